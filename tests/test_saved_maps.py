"""Maps and their layers as things: saved, loaded, tampered with, pickled, copied, compared and shown."""

import copy
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import linattn_edge as la
from cases import OF_HEADS, SAMPLES, both, sample
from linattn_edge.errors import StateMismatchError
from linattn_edge.features import MAPS, restore
from linattn_edge.state import read_file

pytestmark = pytest.mark.nojit
H, N, K, V = 4, 2, 4, 3
RANDOM = ["favor", "favor hyperbolic", "rff"]
LEARNED = ["hedgehog", "hedgehog softmax", "hedgehog joint", "t2r", "product", *OF_HEADS]
GIVEN = [*RANDOM, *LEARNED]
every = pytest.mark.parametrize("name", [*SAMPLES, *OF_HEADS])


def layer(name, **options):
    phi = both(name, K, H, N)[0] if isinstance(name, str) else name
    return la.LinearAttention(
        **({"num_heads": H, "key_dim": K, "value_dim": V, "num_kv_heads": N} | options), feature_map=phi
    )


def tokens(T=3):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, T, heads, width)).astype(np.float32) for heads, width in ((H, K), (N, K), (N, V))]


def run(attn, dtype="float32"):
    state = attn.init_state(2, dtype)
    return attn.prefill(*tokens(), state), state


def saved(name, tmp_path, **options):
    path = tmp_path / "layer.safetensors"
    layer(name, **options).save(path)
    return path


def metadata_of(path):
    return read_file(path, lambda _: None)[1]


def rewrite(path, change):
    """The file with its tensors and its configuration as `change(tensors, config)` left them."""
    tensors, metadata = {n: a.copy() for n, a in load_file(path).items()}, metadata_of(path)
    config = json.loads(metadata["layer"])
    change(tensors, config)
    save_file(tensors, path, metadata | {"layer": json.dumps(config)})


def unreadable(path):
    with pytest.raises(StateMismatchError) as caught:
        la.LinearAttention.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert len(message) < 1000
    return message


# save and load


@every
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_saved_layer_is_the_same_layer(name, backend, tmp_path):
    path = saved(name, tmp_path)
    attn, again = layer(name, backend=backend), la.LinearAttention.load(path, backend=backend)
    assert again.layer.phi == attn.layer.phi
    assert type(again.layer.phi) is type(attn.layer.phi)
    assert again.layer.config() == attn.layer.config()
    assert again.layer.fingerprint == attn.layer.fingerprint
    assert repr(again) == repr(attn)
    np.testing.assert_array_equal(again.layer.phi.weights(K), attn.layer.phi.weights(K))
    (y, state), (z, other) = run(attn), run(again)
    np.testing.assert_array_equal(y, z)
    np.testing.assert_array_equal(again.read(tokens()[0], state), attn.read(tokens()[0], other))  # share states


@every
def test_saving_what_was_loaded_gives_the_same_file(name, tmp_path):
    path = saved(name, tmp_path)
    first = read_file(path, lambda _: None)
    la.LinearAttention.load(path).save(path)
    tensors, metadata = read_file(path, lambda _: None)
    assert metadata == first[1]
    assert {n: a.tobytes() for n, a in tensors.items()} == {n: a.tobytes() for n, a in first[0].items()}


@every
def test_which_maps_bring_their_weights(name, tmp_path):
    tensors = load_file(saved(name, tmp_path))
    assert set(tensors) == ({"feature_map.weights"} if name in GIVEN else set())
    if name in GIVEN:
        np.testing.assert_array_equal(tensors["feature_map.weights"], layer(name).layer.phi.weights(K))


@every
def test_states_of_every_map(name, tmp_path):
    attn = layer(name)
    _, state = run(attn)
    state.save(tmp_path / "state")
    again = la.State.load(tmp_path / "state", la.LinearAttention.load(saved(name, tmp_path)))
    np.testing.assert_array_equal(again.S, state.S)
    np.testing.assert_array_equal(again.position, 3)
    q, k, v = (a[:, 0] for a in tokens())
    np.testing.assert_array_equal(attn.step(q, k, v, again), attn.step(q, k, v, state))


def test_a_state_of_other_weights_is_refused(tmp_path):
    state = layer("t2r").init_state(1)
    state.save(tmp_path / "state")
    other = layer(la.T2R(np.ones((3, K))))
    for call in (
        lambda: la.State.load(tmp_path / "state", other),
        lambda: other.read(np.ones((1, H, K), np.float32), state),
    ):
        with pytest.raises(StateMismatchError, match=r"feature_map.*T2R|feature_map.*t2r") as caught:
            call()
        assert "\n" not in str(caught.value)
    with pytest.raises(StateMismatchError, match="feature_map"):
        layer(la.Favor(4, seed=1)).read(np.ones((1, H, K), np.float32), layer(la.Favor(4, seed=2)).init_state())


CODE = """
import sys
import numpy as np
import linattn_edge as la
attn = la.LinearAttention.load(sys.argv[1], backend="reference")
x = np.ones((1, 4, 4)), np.ones((1, 2, 4)), np.ones((1, 2, 3))
print(attn.step(*x, attn.init_state(1, "float64")).tobytes().hex())
"""


@pytest.mark.parametrize("name", ["favor", "hedgehog heads"])
def test_another_process_reads_the_file(name, tmp_path):
    path = saved(name, tmp_path)
    shown = subprocess.run([sys.executable, "-c", CODE, path], capture_output=True, text=True, check=True).stdout
    attn = layer(name, backend="reference")
    y = attn.step(np.ones((1, 4, 4)), np.ones((1, 2, 4)), np.ones((1, 2, 3)), attn.init_state(1, "float64"))
    np.testing.assert_allclose(np.frombuffer(bytes.fromhex(shown.strip())), y.ravel(), rtol=1e-12)


def test_a_key_map_of_its_own_comes_back(tmp_path):
    for phi in (
        la.T2R(np.eye(3, K), key=la.T2R(np.ones((3, K)), np.ones(3))),
        la.ElementwiseProduct(np.eye(3, K), np.ones((3, K)), key=la.ElementwiseProduct(np.ones((3, K)), np.eye(3, K))),
        la.Hedgehog(np.eye(3, K), variant="joint", key=la.Hedgehog(np.ones((3, K)), variant="joint")),
        la.T2R(np.ones((H, 2, K)), key=la.T2R(np.eye(2, K))),
        la.T2R(np.eye(2, K), key=la.T2R(np.ones((N, 2, K)))),
    ):
        attn = layer(phi)
        attn.save(tmp_path / "layer")
        again = la.LinearAttention.load(tmp_path / "layer")
        assert again.layer.phi == phi
        for side in range(-1, 1):
            assert again.layer.phi.heads(side) == phi.heads(side)
        np.testing.assert_array_equal(run(again)[0], run(attn)[0])


# files that were changed


@pytest.mark.parametrize("name", GIVEN)
def test_a_number_that_was_changed(name, tmp_path):
    """Each number of the table: a weight, a bias, a draw."""
    size = load_file(saved(name, tmp_path))["feature_map.weights"].shape[2]
    for at in {1, size // 2, size - 1}:
        path = saved(name, tmp_path)

        def change(tensors, config, at=at):
            tensors["feature_map.weights"][-1, 0, at] += 1e-6

        rewrite(path, change)
        assert MAPS[layer(name).layer.phi.name].name in unreadable(path)


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_in_the_file(name, bad, tmp_path):
    path = saved(name, tmp_path)
    rewrite(path, lambda tensors, config: tensors["feature_map.weights"].__setitem__((0, 0, 2), bad))
    unreadable(path)


@pytest.mark.parametrize("name", GIVEN)
def test_weights_that_are_missing(name, tmp_path):
    path = saved(name, tmp_path)
    rewrite(path, lambda tensors, config: tensors.pop("feature_map.weights"))
    assert layer(name).layer.phi.name in unreadable(path)


SHAPES = {
    "flat": lambda w: w.ravel(),
    "number": lambda w: w.ravel()[:1].reshape(()),
    "two axes": lambda w: w[0],
    "four axes": lambda w: w[None],
    "short": lambda w: np.ascontiguousarray(w[..., :-1]),
    "long": lambda w: np.concatenate([w, w[..., :1]], axis=-1),
    "empty": lambda w: w[:0],
    "no numbers": lambda w: w[..., :0],
    "no heads": lambda w: w[:, :0],
    "a side more": lambda w: np.concatenate([w, w[:1]]),
    "float16": lambda w: w.astype(np.float16),
    "integers": lambda w: w.astype(np.int64),
    "bool": lambda w: w > 0,
}


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("kind", SHAPES)
def test_weights_of_a_wrong_shape_or_kind(name, kind, tmp_path):
    path = saved(name, tmp_path)

    def change(tensors, config):
        tensors["feature_map.weights"] = np.ascontiguousarray(SHAPES[kind](tensors["feature_map.weights"]))

    rewrite(path, change)
    unreadable(path)


CONFIGURATIONS = {
    "key_dim": lambda config, phi: config.update(key_dim=K + 1),
    "key_dim of 2": lambda config, phi: config.update(key_dim=2),
    "huge key_dim": lambda config, phi: config.update(key_dim=2**40),
    "text as key_dim": lambda config, phi: config.update(key_dim="4"),
    "no key_dim": lambda config, phi: config.pop("key_dim"),
    "name": lambda config, phi: phi.update(name="t2r" if phi["name"] != "t2r" else "hedgehog"),
    "another name": lambda config, phi: phi.update(name="elu"),
    "no name": lambda config, phi: phi.pop("name"),
    "list as name": lambda config, phi: phi.update(name=["favor"]),
    "one more": lambda config, phi: phi.update(colour="red"),
    "list": lambda config, phi: config.update(feature_map=[phi]),
    "class": lambda config, phi: phi.update({"class": "os.system"}),
}
OF_RANDOM = {
    "seed": lambda phi: phi.update(seed=phi["seed"] + 1),
    "text as seed": lambda phi: phi.update(seed="0"),
    "orthogonal": lambda phi: phi.update(orthogonal=not phi["orthogonal"]),
    "num_features": lambda phi: phi.update(num_features=phi["num_features"] + 1),
    "huge num_features": lambda phi: phi.update(num_features=2**60),
    "no seed": lambda phi: phi.pop("seed"),
}
OF_LEARNED = {
    "sha256": lambda phi: phi.update(sha256="0" * 64),
    "no sha256": lambda phi: phi.pop("sha256"),
    "number as sha256": lambda phi: phi.update(sha256=3),
    "query_shape": lambda phi: phi["query_shape"].__setitem__(1, phi["query_shape"][1] + 1),
    "heads": lambda phi: phi["query_shape"].__setitem__(0, 3),
    "negative heads": lambda phi: phi["key_shape"].__setitem__(0, -1),
    "no heads": lambda phi: phi["key_shape"].__setitem__(0, 0),
    "huge shape": lambda phi: phi.update(query_shape=[1, 2**60, K + 1]),
    "negative shape": lambda phi: phi.update(query_shape=[1, -3, K + 1]),
    "short shape": lambda phi: phi["query_shape"].pop(),
    "text as shape": lambda phi: phi.update(query_shape="3"),
    "numbers as shape": lambda phi: phi.update(query_shape=3),
    "fractions": lambda phi: phi.update(query_shape=[float(x) for x in phi["query_shape"]]),
    "none": lambda phi: phi.update(key_shape=None),
    "no shape": lambda phi: phi.pop("key_shape"),
    "variant": lambda phi: phi.update(variant="softmax" if phi.get("variant") == "exp" else "exp"),
    "nonsense variant": lambda phi: phi.update(variant="nonsense"),
}


@pytest.mark.parametrize("change", CONFIGURATIONS)
@pytest.mark.parametrize("name", ["favor", "rff", "hedgehog", "t2r heads"])
def test_configurations_that_were_changed(name, change, tmp_path):
    path = saved(name, tmp_path)
    rewrite(path, lambda tensors, config: CONFIGURATIONS[change](config, config["feature_map"]))
    unreadable(path)


@pytest.mark.parametrize("name", OF_HEADS)
def test_weights_for_other_heads_than_the_file_says(name, tmp_path):
    path = saved(name, tmp_path)
    rewrite(path, lambda tensors, config: config.update(num_heads=6))
    assert "heads" in unreadable(path)


@pytest.mark.parametrize("change", OF_RANDOM)
@pytest.mark.parametrize("name", RANDOM)
def test_parameters_of_random_maps_that_were_changed(name, change, tmp_path):
    path = saved(name, tmp_path)
    rewrite(path, lambda tensors, config: OF_RANDOM[change](config["feature_map"]))
    unreadable(path)


@pytest.mark.parametrize("change", OF_LEARNED)
@pytest.mark.parametrize("name", ["hedgehog", "hedgehog heads", "t2r", "product heads"])
def test_parameters_of_learned_maps_that_were_changed(name, change, tmp_path):
    path = saved(name, tmp_path)
    rewrite(path, lambda tensors, config: OF_LEARNED[change](config["feature_map"]))
    unreadable(path)


def test_new_weights_with_a_digest_that_fits_them_are_another_layer(tmp_path):
    """Both places tell of it: the map's digest and the list of arrays."""
    path, other = saved("t2r", tmp_path), layer(la.T2R(np.ones((3, K)), np.ones(3)))

    def change(tensors, config):
        tensors["feature_map.weights"] = other.layer.phi.weights(K)
        config["feature_map"] = other.layer.phi.config()

    rewrite(path, change)
    unreadable(path)


@pytest.mark.parametrize("name", ["cosformer", "dpfp sum", "polynomial3", "taylor3"])
def test_parameters_that_were_changed_to_nonsense(name, tmp_path):
    for change in ({"max_len": 0}, {"nu": -1}, {"order": "3"}, {"degree": None}, {"sum_norm": "no"}, {"seed": 1}):
        path = saved(name, tmp_path)
        rewrite(path, lambda tensors, config, change=change: config["feature_map"].update(change))
        unreadable(path)


@pytest.mark.parametrize("config", [None, 3, [], {}, {"name": None}, {"name": "nonsense"}, {"name": "custom"}, "elu"])
def test_what_is_no_configuration_of_a_map(config):
    with pytest.raises(ValueError, match="feature_map"):
        restore(config, K, None)


# pickles and copies


WAYS = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "old pickle": lambda x: pickle.loads(pickle.dumps(x, 2)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@every
@pytest.mark.parametrize("way", WAYS)
def test_copies_of_a_map(name, way):
    phi = both(name, K, H, N)[0]
    twin = WAYS[way](phi)
    assert twin is not phi
    assert twin == phi
    assert hash(twin) == hash(phi)
    assert repr(twin) == repr(phi)
    np.testing.assert_array_equal(twin.weights(K), phi.weights(K))
    np.testing.assert_array_equal(run(layer(twin))[0], run(layer(phi))[0])


@every
@pytest.mark.parametrize("way", WAYS)
def test_copies_of_a_layer(name, way):
    attn = layer(name)
    y, state = run(attn)
    for original in (attn, layer(name)):  # one whose kernels are there, one that is new
        twin = WAYS[way](original)
        np.testing.assert_array_equal(run(twin)[0], y)
        q, k, v = (a[:, 0] for a in tokens())
        other = WAYS[way](state)
        np.testing.assert_array_equal(twin.step(q, k, v, other), attn.step(q, k, v, state.copy()))


# comparison and show


@every
def test_equality_and_hash(name):
    phi, again = (both(name, K, H, N)[0] for _ in range(2))
    assert phi == again
    assert (phi != again) is False
    assert hash(phi) == hash(again)
    assert len({phi, again}) == 1
    others = [n for n in [*SAMPLES, *OF_HEADS] if n != name and both(n, K, H, N)[0] == phi]
    assert not others
    for thing in (phi.name, None, 3, object()):
        assert phi != thing


@pytest.mark.parametrize("cls", [la.T2R, la.Hedgehog, la.ElementwiseProduct])
def test_one_bit_of_a_weight_makes_another_map(cls):
    w = np.ones((3, K))
    almost = w.copy()
    almost[2, 1] = np.nextafter(1, 2)
    second = (w,) if cls is la.ElementwiseProduct else ()
    bias = {"bias2" if second else "bias": [0, 0, 1]}
    phi = cls(w, *second)
    for other in (
        cls(almost, *second),
        cls(w, *second, **bias),
        cls(w[:2], *(a[:2] for a in second)),
        cls(w[None].repeat(2, 0), *(a[None].repeat(2, 0) for a in second)),
        cls(w, *second, key=cls(almost, *second)),
    ):
        assert other != phi
        assert layer(phi, num_heads=2).layer.fingerprint != layer(other, num_heads=2).layer.fingerprint
    assert cls(w, *second, key=cls(w, *second)) == phi  # the same on both sides
    assert cls(w.astype(np.float32), *second) == phi


def test_parameters_tell_random_maps_apart():
    maps = [la.Favor(8), la.Favor(9), la.Favor(8, 1), la.Favor(8, orthogonal=False), la.Favor(8, hyperbolic=True)]
    maps += [la.Rff(8), la.Rff(9), la.Rff(8, 1), la.Rff(8, orthogonal=False)]
    assert len(set(maps)) == len(maps)


@every
def test_repr_is_one_short_line(name):
    phi = both(name, K, H, N)[0]
    for shown in (repr(phi), repr(layer(name))):
        assert "\n" not in shown
        assert len(shown) < 300
        assert type(phi).__name__ in shown
    if name not in LEARNED:
        assert eval(repr(phi), vars(la)) == phi
    for parameter in phi.parameters:
        assert repr(getattr(phi, parameter)) in repr(phi)


def test_repr_of_learned_maps_has_shapes_and_no_numbers():
    assert "[4, 3, 4]" in repr(both("hedgehog heads", K, H, N)[0])
    assert "'joint'" in repr(sample("hedgehog joint"))
    assert repr(la.T2R(np.ones((64, 64)))) == "T2R([1, 64, 64])"


@every
def test_config_is_json(name):
    config = both(name, K, H, N)[0].config()
    assert json.loads(json.dumps(config)) == config
    assert config["name"] in MAPS
