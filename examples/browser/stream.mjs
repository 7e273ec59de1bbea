// A stream through an exported file, for onnxruntime-node and onnxruntime-web. For copying.
//
//     const stream = new Stream(ort, session, readContract(bytes));
//     const call = stream.call(1);              // buffers for calls of one token
//     call.inputs.query.set(q);                 // write into them ...
//     await stream.run(call);                   // ... and run: the state moves on
//     call.outputs.output                       // read it before the next run

import { lengths } from './contract.mjs';

const ARRAYS = {
  float32: Float32Array,
  int32: Int32Array,
  int64: BigInt64Array,
  float16: globalThis.Float16Array, // not in every engine
};

/** A file and the state of its streams. */
export class Stream {
  /**
   * bind: write outputs and states into buffers of our own, the state's two taking turns. onnxruntime-node does that;
   * onnxruntime-web 1.30 leaves such buffers as they were on the CPU, so there every call gives new ones.
   */
  constructor(ort, session, contract, { batchSize = 1, bind = false } = {}) {
    Object.assign(this, { ort, session, contract, bind });
    this.batchSize = contract.batch_size ?? batchSize;
    this.calls = new Map();
    this.reset();
  }

  /** Begin anew. */
  reset() {
    const fresh = () => this.contract.states.map((state) => this.tensor(state, 1, state.initial));
    this.states = this.bind ? [fresh(), fresh()] : [fresh()];
    this.turn = 0; // states[turn] is the state as it is now
    this.calls.clear();
  }

  /** Bytes of state: the same at every position. */
  get stateBytes() {
    return this.states[this.turn].reduce((sum, tensor) => sum + tensor.data.byteLength, 0);
  }

  /** The buffers for calls of that many tokens, made the first time. */
  call(tokens) {
    if (!this.calls.has(tokens)) this.calls.set(tokens, this.makeCall(tokens));
    return this.calls.get(tokens);
  }

  makeCall(tokens) {
    const { inputs, outputs, states } = this.contract;
    const named = (list) => Object.fromEntries(list.map((t) => [t.name, this.tensor(t, tokens)]));
    const data = (tensors) => Object.fromEntries(Object.entries(tensors).map(([name, t]) => [name, t.data]));
    const [given, results] = [named(inputs), named(outputs)];
    const turns = this.states.map((held, turn) => {
      const feeds = { ...given };
      const fetches = { ...results };
      states.forEach((state, i) => {
        feeds[state.past] = held[i];
        fetches[state.present] = this.states[(turn + 1) % this.states.length][i];
      });
      return { feeds, fetches: this.bind ? fetches : Object.keys(fetches) };
    });
    return { tokens, inputs: data(given), outputs: data(results), turns };
  }

  /** One call; what was the new state is the old one of the next. */
  async run(call) {
    const { feeds, fetches } = call.turns[this.turn];
    if (this.bind) {
      await this.session.run(feeds, fetches);
      this.turn = 1 - this.turn;
      return;
    }
    const [held] = this.states;
    this.contract.states.forEach((state, i) => (feeds[state.past] = held[i]));
    const found = await this.session.run(feeds, fetches);
    this.contract.states.forEach((state, i) => (held[i] = found[state.present]));
    for (const { name } of this.contract.outputs) call.outputs[name] = found[name].data;
  }

  tensor({ dtype, shape }, tokens, value = 0) {
    const Kind = ARRAYS[dtype];
    if (Kind === undefined) throw new Error(`this engine has no arrays of ${dtype}`);
    const sizes = shape.map((size) => ({ B: this.batchSize, T: tokens })[size] ?? size);
    const data = new Kind(sizes.reduce((product, size) => product * size, 1));
    data.fill(Kind === BigInt64Array ? BigInt(value) : value);
    return new this.ort.Tensor(dtype, data, sizes);
  }
}

/** Token t of a made-up signal for a layer: waves of different speeds, keys short enough for delta rules. */
export function fillWave(contract, inputs, t, noise = () => 0) {
  const shapes = { key: [contract.layers[0].key_dim ** -0.5, 0], decay: [0.08, -0.1], beta: [0.4, 0.5] };
  contract.inputs.forEach(({ name, shape }, i) => {
    const [amplitude, middle] = shapes[name] ?? [1, 0];
    const array = inputs[name];
    const width = shape.at(-1);
    for (let c = 0; c < array.length; c++) {
      array[c] = amplitude * (Math.sin(0.37 * (i + 1) * t + 0.11 * (c % width)) + noise()) + middle;
    }
  });
}

/** Feed ids to a model. Gives the logits after the last of them. */
export async function feed(stream, ids) {
  const vocabulary = stream.contract.outputs[0].shape.at(-1);
  let start = 0;
  let logits;
  for (const length of lengths(stream.contract, ids.length)) {
    const call = stream.call(length);
    for (let i = 0; i < length; i++) call.inputs.input_ids[i] = BigInt(ids[start + i]);
    await stream.run(call);
    logits = call.outputs.logits.subarray((length - 1) * vocabulary, length * vocabulary);
    start += length;
  }
  return logits;
}

/** The next id: the likeliest at temperature 0, else drawn from the fewest that reach topP together. */
export function choose(logits, { temperature = 0.8, topP = 1, random = Math.random } = {}) {
  const best = logits.reduce((found, x, i) => (x > logits[found] ? i : found), 0);
  if (temperature === 0) return best;
  const weights = Array.from(logits, (x, id) => [Math.exp((x - logits[best]) / temperature), id]);
  weights.sort((a, b) => b[0] - a[0]);
  const enough = topP * weights.reduce((sum, [weight]) => sum + weight, 0);
  let kept = 0;
  let total = 0;
  while (kept < weights.length && total < enough) total += weights[kept++][0];
  let left = random() * total;
  for (let i = 0; i < kept; i++) {
    left -= weights[i][0];
    if (left < 0) return weights[i][1];
  }
  return best;
}
