"""Decay per channel in a block: D[i, j] has a number for each channel, too many to hold for all pairs.

The block is cut into tiles of TILE tokens. Within a tile all pairs and channels are held at once. Between tiles D is a
product of three decays: from j to the end of its tile, over the tiles between, and from the start of i's tile to i; the
middle one is held for pairs of tiles only. Every exponent is a sum of g over a stretch, so none is above 0.
"""

import numpy as np

from linattn_export.graph import Graph
from linattn_export.masks import BLOCK, above, lower

TILE = 8


class ChannelDecay:
    """The decays of a block. g: [B, N, T, F]."""

    def __init__(self, graph: Graph, g: str, N: int, F: int) -> None:
        self.graph, self.g, self.N, self.F = graph, g, N, F
        self._tiles()

    def _tiles(self) -> None:
        graph, N, F = self.graph, self.N, self.F
        node = graph.node
        if graph.tokens is not None:
            count = -(-graph.tokens // TILE)
            self._missing: int | None = -graph.tokens % TILE
            self._count = graph.ints(count)
        else:
            self._count = graph.once("tiles", self._counted)
            self._missing = None
        g = self._tiled(self.g, [F])  # [B, N, C, c, F]
        upto, after = np.tri(TILE), np.tri(TILE, k=-1).T
        self._upto = node("Exp", node("MatMul", graph.constant(upto), g))  # from the tile's start to i
        self._after = node("Exp", node("MatMul", graph.constant(after), g))  # from j to the tile's end
        i, j, s = np.indices((TILE, TILE, TILE))
        within = ((j < s) & (s <= i)).reshape(TILE * TILE, TILE)
        E = node("Exp", node("MatMul", graph.constant(within), g))  # [B, N, C, c·c, F]
        self._within = self._cut(E, [TILE, TILE, F])
        total = node("ReduceSum", g, graph.ints(3), keepdims=0)  # [B, N, C, F]
        between = node("Exp", node("MatMul", self._between(), total))  # [B, N, C·C, F], J before I
        shape = node("Concat", graph.ints(0, N), self._count, self._count, graph.ints(1, F), axis=0)
        self._over = node("Reshape", between, shape)  # [B, N, J, I, 1, F]

    def _counted(self) -> str:
        graph = self.graph
        count = graph.node("Div", graph.node("Add", graph.token_count(), graph.ints(TILE - 1)), graph.ints(TILE))
        return graph.node("Max", count, graph.ints(1))  # in a Reshape a 0 would mean something else

    def _padding(self, axes: int) -> str:
        """The pads of a tensor of that many axes, whose third is T."""
        graph = self.graph
        if self._missing is not None:
            pads = [0] * (2 * axes)
            pads[axes + 2] = self._missing
            return graph.ints(*pads)

        def make() -> str:
            whole = graph.node("Mul", self._count, graph.ints(TILE))
            missing = graph.node("Sub", whole, graph.token_count())
            return graph.node("Concat", graph.ints(*[0] * (axes + 2)), missing, graph.ints(*[0] * (axes - 3)), axis=0)

        return graph.once(("tile pads", axes), make)

    def _between(self) -> str:
        """[C·C, C]: 1 where tile s lies between tile J and tile I; the pair is J·C + I."""
        graph = self.graph
        side = BLOCK // TILE if graph.tokens is None else -(-graph.tokens // TILE)
        J, I, s = np.indices((side, side, side))  # noqa: E741
        whole = (s > J) & (s < I)
        if graph.tokens is not None:
            return graph.constant(whole.reshape(-1, side), hint="tiles_between")

        def cut() -> str:
            ends = graph.node("Concat", self._count, self._count, self._count, axis=0)
            constant = graph.constant(whole, hint="tiles_between")
            part = graph.node("Slice", constant, graph.ints(0, 0, 0), ends, graph.ints(0, 1, 2))
            square = graph.node("Mul", self._count, self._count)
            return graph.node("Reshape", part, graph.node("Concat", square, self._count, axis=0))

        return graph.once("tiles between", cut)

    def _tiled(self, x: str, after: list[int]) -> str:
        """[B, N, T, …] as [B, N, C, c, …], with zeros after the last token."""
        if self._missing != 0:
            x = self.graph.node("Pad", x, self._padding(2 + len(after) + 1))
        return self._cut(x, [TILE, *after])

    def _cut(self, x: str, after: list[int]) -> str:
        """x as [B, N, C, …]."""
        shape = self.graph.node("Concat", self.graph.ints(0, self.N), self._count, self.graph.ints(*after), axis=0)
        return self.graph.node("Reshape", x, shape)

    def pairs(self, x: str, k: str, kT: str, readers: int) -> str:
        """Σ_f x_f k_f D_f, [B, N, T, T] or [B, N, r, T, T]; above the diagonal it means nothing."""
        graph, N, F, r = self.graph, self.N, self.F, readers
        node = graph.node
        rows = node("Mul", self._count, graph.ints(TILE))
        k = graph.once(("tiled", k), lambda: self._tiled(k, [F]))  # [B, N, C, c, F]
        near = graph.once(("near", k), lambda: node("Mul", self._within, node("Unsqueeze", k, graph.ints(3))))
        over = graph.once(("over", k), lambda: node("Mul", k, self._after))
        over = node("Transpose", over, perm=[0, 1, 2, 4, 3])  # [B, N, J, F, j]; near is [B, N, C, i, j, F]
        if r == 1:
            x = self._tiled(x, [F])  # [B, N, C, c, F]
            near = node("MatMul", near, node("Unsqueeze", x, graph.ints(5)))
            x = node("Unsqueeze", node("Mul", x, self._upto), graph.ints(2))
        else:
            x = self._tiled(node("Transpose", x, perm=[0, 1, 3, 2, 4]), [r, F])  # [B, N, C, c, r, F]
            near = node("MatMul", near, node("Transpose", x, perm=[0, 1, 2, 3, 5, 4]))
            near = node("Transpose", near, perm=[0, 1, 5, 2, 3, 4])  # [B, N, r, C, i, j]
            x = node("Mul", x, node("Unsqueeze", self._upto, graph.ints(4)))
            x = node("Reshape", x, node("Concat", graph.ints(0, 0, 1), self._count, graph.ints(TILE * r, F), axis=0))
        lead = graph.ints(0, N) if r == 1 else graph.ints(0, N, r)
        near = node("Reshape", near, node("Concat", lead, rows, graph.ints(1, TILE), axis=0))
        # x of every tile I, decayed over the tiles between, times k of tile J
        x = node("Mul", x, self._over)  # [B, N, J, I, c·r, F]
        each = rows if r == 1 else node("Mul", rows, graph.ints(r))
        x = node("Reshape", x, node("Concat", graph.ints(0, 0), self._count, each, graph.ints(F), axis=0))
        far = node("MatMul", x, over)  # [B, N, J, (I i r), j]
        if r == 1:
            far = node("Transpose", far, perm=[0, 1, 3, 2, 4])  # [B, N, (I i), J, j]
        else:
            shape = node("Concat", graph.ints(0, 0), self._count, rows, graph.ints(r, TILE), axis=0)
            far = node("Transpose", node("Reshape", far, shape), perm=[0, 1, 4, 3, 2, 5])
        pairs = node("Where", self._same(rows), near, far)
        pairs = node("Reshape", pairs, node("Concat", lead, rows, rows, axis=0))
        if self._missing == 0:
            return pairs
        count = graph.token_count()
        ends = graph.once("T, T", lambda: node("Concat", count, count, axis=0))
        return node("Slice", pairs, graph.ints(0, 0), ends, graph.ints(-2, -1))

    def _same(self, rows: str) -> str:
        """[(I i), J, 1]: whether J is the row's own tile."""
        graph = self.graph
        side = BLOCK // TILE if graph.tokens is None else -(-graph.tokens // TILE)
        whole = np.repeat(np.eye(side), TILE, axis=0)[:, :, None]
        constant = graph.constant(whole, "bool", hint="same_tile")
        if graph.tokens is not None:
            return constant

        def cut() -> str:
            ends = graph.node("Concat", rows, self._count, axis=0)
            return graph.node("Slice", constant, graph.ints(0, 0), ends, graph.ints(0, 1))

        return graph.once("same tile", cut)

    def from_past(self) -> str:
        """w, [B, N, T, F]."""
        return self.graph.node("Exp", self.graph.node("MatMul", lower(self.graph), self.g), hint="w")

    def whole(self) -> str:
        """w_T, [B, N, F, 1]."""
        total = self.graph.node("ReduceSum", self.g, self.graph.ints(2), keepdims=0)
        return self.graph.node("Unsqueeze", self.graph.node("Exp", total), self.graph.ints(3))

    def to_end(self, k: str, kT: str) -> str:
        """(e ∘ k)ᵀ, [B, N, F, T]."""
        e = self.graph.node("Exp", self.graph.node("MatMul", above(self.graph), self.g), hint="e")
        return self.graph.node("Transpose", self.graph.node("Mul", k, e), perm=[0, 1, 3, 2])
