// Drive an exported file in ONNX Runtime from node, token by token.
//
//     npm ci --prefix examples
//     node examples/onnx_stream.mjs layer.onnx
//     node examples/onnx_stream.mjs model.onnx --prompt "In the beginning"
//     node examples/onnx_stream.mjs layer.onnx --runtime onnxruntime-web      # the same file in WebAssembly
//
// The prompt of a model that does not speak bytes is ids, with spaces between.
// Further: --tokens 1000, --temperature 0.8, --json FILE (times and first outputs, to compare runtimes).

import { readFileSync, writeFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import { readContract } from './browser/contract.mjs';
import { Stream, choose, feed, fillWave } from './browser/stream.mjs';

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    runtime: { type: 'string', default: 'onnxruntime-node' },
    tokens: { type: 'string', default: '1000' },
    prompt: { type: 'string', default: 'In the beginning' },
    temperature: { type: 'string', default: '0.8' },
    json: { type: 'string' },
  },
});
const [file] = positionals;
const count = Number(options.tokens);
const temperature = Number(options.temperature);
if (file === undefined || !(count >= 1) || !(temperature >= 0) || !options.prompt) {
  console.error('usage: node onnx_stream.mjs FILE.onnx [--runtime onnxruntime-node | onnxruntime-web] [--tokens N] ...');
  process.exit(2);
}
process.on('uncaughtException', (error) => {
  console.error(`onnx_stream.mjs: ${error.message}`);
  process.exit(1);
});

const ort = await import(options.runtime);
const web = options.runtime.startsWith('onnxruntime-web');
if (web) ort.env.wasm.numThreads = 1;

const content = readFileSync(file);
const contract = readContract(content);
// onnxruntime-node gets the path, so that it finds weights kept beside the file
const session = await ort.InferenceSession.create(web ? content : file, {
  intraOpNumThreads: 1, // for one token at a time, more threads cost more than they bring
  interOpNumThreads: 1,
  logSeverityLevel: 3,
});
const stream = new Stream(ort, session, contract, { bind: !web });
console.log(`${file}: ${contract.kind}, ${contract.flavor}, opset ${contract.opset}`);
console.log(`state: ${contract.states.length} tensors, ${stream.stateBytes} bytes, the same at every position`);

const times = [];
async function timed(work) {
  const start = performance.now();
  const result = await work();
  times.push(1000 * (performance.now() - start));
  return result;
}

const found = {};
if (contract.kind === 'layer') {
  const call = stream.call(contract.tokens ?? 1);
  const [output] = contract.outputs;
  found.outputs = [];
  for (let t = 0; t < count; t++) {
    fillWave(contract, call.inputs, t);
    await timed(() => stream.run(call));
    if (t < 32) found.outputs.push(Array.from(call.outputs[output.name]));
  }
} else {
  const bytes = contract.outputs[0].shape.at(-1) === 256; // else the prompt is ids, with spaces between
  const ids = bytes ? new TextEncoder().encode(options.prompt) : options.prompt.split(' ').map(Number);
  const text = new TextDecoder();
  let logits = await feed(stream, ids);
  found.logits = Array.from(logits);
  found.ids = [];
  for (let t = 0; t < count; t++) {
    const id = choose(logits, { temperature });
    found.ids.push(id);
    process.stdout.write(bytes ? text.decode(Uint8Array.of(id), { stream: true }) : `${id} `);
    logits = await timed(() => feed(stream, [id]));
  }
  console.log();
}

const version = ort.env.versions[web ? 'web' : 'node'];
times.sort((a, b) => a - b);
const [p50, p99] = [0.5, 0.99].map((part) => times[Math.floor(part * (times.length - 1))]);
console.log(
  `${options.runtime} ${version}: ${p50.toFixed(1)} µs a token (median of ${count}), 99 % below ${p99.toFixed(1)}`,
);
if (options.json) {
  writeFileSync(options.json, JSON.stringify({ runtime: `${options.runtime} ${version}`, microseconds: p50, ...found }));
}
