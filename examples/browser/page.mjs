// The page: loads model.onnx, lets it write (a model) or run (a layer), and shows what each token costs.

import * as ort from './vendor/ort.wasm.bundle.min.mjs';
import { Chart, Series, median, quantile } from './chart.mjs';
import { readContract } from './contract.mjs';
import { Stream, choose, feed, fillWave } from './stream.mjs';

const FILE = 'model.onnx';
const FRAME = 12; // milliseconds of work between two pictures
const BYTES = 256; // ids are the bytes of UTF-8
const RECENT = 256; // tokens that the figures are the median of

const $ = (id) => document.getElementById(id);
const status = (now) => (document.body.dataset.status = now);
const number = (x, digits = 0) => x.toLocaleString('en', { maximumFractionDigits: digits });
const time = (ms) => (ms === 0 ? '0' : ms < 1 ? `${number(1000 * ms)} µs` : `${number(ms, ms < 10 ? 2 : 1)} ms`);
const size = (bytes) => {
  const power = bytes < 1024 ? 0 : Math.min(3, Math.floor(Math.log2(bytes) / 10));
  const value = bytes / 1024 ** power;
  return `${number(value, value < 10 ? 1 : 0)} ${['B', 'KiB', 'MiB', 'GiB'][power]}`;
};

let stream;
let contract;
let running = null; // an object while a stream runs; `stop` in it ends the run
let logits = null; // what the model said last
let text; // bytes into characters
let position = 0;
let elapsed = 0; // milliseconds of running, and how many tokens came in them
let came = 0;
const times = new Series();
const recent = [];
const waves = { signal: [], output: [] };
let charts;

const isModel = () => contract.kind === 'model';
const nextFrame = () =>
  Promise.race([new Promise(requestAnimationFrame), new Promise((resolve) => setTimeout(resolve, 100))]);

/** Bytes a softmax layer with these heads would keep for each token, in float32; null where the file doesn't tell. */
function cachePerToken() {
  let bytes = 0;
  for (const { num_heads, num_kv_heads, key_dim, value_dim } of contract.layers) {
    bytes += 4 * (num_kv_heads ?? num_heads) * (key_dim + (value_dim ?? key_dim));
  }
  return Number.isFinite(bytes) && bytes > 0 ? bytes : null;
}

async function load() {
  const response = await fetch(FILE);
  if (!response.ok) throw new Error(`${FILE}: ${response.status}. Run prepare.py first, which puts it there.`);
  const bytes = new Uint8Array(await response.arrayBuffer());
  contract = readContract(bytes);
  const vocabulary = isModel() ? contract.outputs[0].shape.at(-1) : BYTES;
  if (vocabulary !== BYTES) {
    throw new Error(`${FILE}: a vocabulary of ${vocabulary}; this page has no tokenizer, and speaks bytes only`);
  }
  ort.env.wasm.numThreads = 1; // more need cross-origin isolation, and gain nothing at one token at a time
  const session = await ort.InferenceSession.create(bytes, { logSeverityLevel: 3 });
  stream = new Stream(ort, session, contract);
  describe(bytes.length);
}

function describe(bytes) {
  $('runtime').textContent = `ONNX Runtime ${ort.env.versions.web} · WebAssembly, one thread`;
  $('writing').hidden = $('heat').hidden = !isModel();
  $('signal').hidden = isModel();
  $('state').textContent = size(stream.stateBytes);
  if (!isModel()) {
    $('lead').textContent += ' This file is a single layer; the signal is made up.';
    $('length').value = 'Infinity';
  }
  const kinds = (name) => [...new Set(contract.layers.map(name))].map((kind) => `“${kind}”`).join(', ');
  const count = contract.layers.length;
  const clock = crossOriginIsolated ? '0.005 ms' : '0.1 ms';
  if (!crossOriginIsolated) $('how').textContent += `, by a clock in steps of ${clock}`;
  $('facts').textContent =
    `${FILE}: ${size(bytes)}, flavor “${contract.flavor}”, opset ${contract.opset}; ${count} ` +
    `${count > 1 ? 'layers' : 'layer'} with the rule ${kinds((layer) => layer.update_rule)} and the feature map ` +
    `${kinds((layer) => layer.feature_map.name)}; written by linattn_export ${contract.exporter_version}. The clock of ` +
    `this tab has steps of ${clock}.`;
  const shape = ({ dtype, shape }) => `${dtype} [${shape.join(', ')}]`;
  const rows = [['name', 'tensor', 'what it is']];
  for (const t of contract.inputs) rows.push([t.name, shape(t), t.layout]);
  for (const t of contract.outputs) rows.push([t.name, shape(t), t.layout]);
  for (const s of contract.states) rows.push([`${s.past} → ${s.present}`, shape(s), s.layout]);
  $('contract').replaceChildren(
    ...rows.map((cells, i) => {
      const row = document.createElement('tr');
      row.append(...cells.map((cell) => Object.assign(document.createElement(i ? 'td' : 'th'), { textContent: cell })));
      return row;
    }),
  );
  $('memory').hidden = cachePerToken() === null;
  charts = {
    times: new Chart($('times'), { format: time }),
    bytes: new Chart($('bytes'), { format: size, binary: true }),
    wave: new Chart($('wave'), { format: () => '', center: true }),
  };
  paint();
}

/** All figures and charts, from what is known now. */
function paint() {
  $('position').textContent = number(position);
  if (recent.length) {
    $('latency').textContent = time(median(recent));
    $('rate').textContent = number((1000 * came) / elapsed);
  }
  const to = Math.max(position, 100);
  const usual = recent.length ? 2.2 * quantile(times.y, 0.9) : 1;
  charts.times.draw({ to, top: usual, dots: times, lines: [{ points: times.smooth(120), color: 'first' }] });
  const each = cachePerToken();
  if (each !== null) {
    const state = stream.stateBytes;
    const cache = each * position;
    charts.bytes.draw({
      to,
      top: 1.15 * Math.max(state, each * to),
      lines: [
        { points: [[0, 0], [position, cache]], color: 'second' }, // prettier-ignore
        { points: [[0, state], [to, state]], color: 'first' }, // prettier-ignore
      ],
    });
    $('ratio').textContent = position ? `${size(state)} here, ${size(cache)} in a cache` : '';
  }
  if (!isModel()) {
    const points = (kept) => {
      const largest = Math.max(1e-9, ...kept.map(Math.abs));
      return kept.map((y, i) => [position - kept.length + i, y / largest]);
    };
    charts.wave.draw({
      from: Math.max(0, position - 400),
      to: Math.max(400, position),
      top: 1.1,
      lines: [
        { points: points(waves.signal), color: 'second' },
        { points: points(waves.output), color: 'first' },
      ],
    });
  }
}

/** A new stream: the state, the text and the figures begin anew. */
function reset() {
  stream.reset();
  times.clear();
  recent.length = waves.signal.length = waves.output.length = 0;
  position = elapsed = came = 0;
  logits = null;
  text = new TextDecoder();
  $('given').textContent = $('made').textContent = '';
}

function timed(milliseconds) {
  position += 1;
  came += 1;
  times.add(position, milliseconds);
  recent.push(milliseconds);
  if (recent.length > RECENT) recent.shift();
}

async function readPrompt() {
  const prompt = $('prompt').value || '\n';
  $('given').textContent = prompt;
  const ids = new TextEncoder().encode(prompt);
  logits = await feed(stream, ids);
  position += ids.length;
}

async function writeToken() {
  const id = choose(logits, { temperature: Number($('temperature').value), topP: 0.95 });
  const begin = performance.now();
  logits = await feed(stream, [id]);
  timed(performance.now() - begin);
  return text.decode(Uint8Array.of(id), { stream: true });
}

async function layerToken() {
  const call = stream.call(contract.tokens ?? 1);
  fillWave(contract, call.inputs, position / 12, () => 0.3 * (Math.random() - 0.5));
  const begin = performance.now();
  await stream.run(call);
  timed(performance.now() - begin);
  const signal = (call.inputs.value ?? call.inputs[contract.inputs[0].name])[0];
  for (const [kept, y] of [[waves.signal, signal], [waves.output, call.outputs[contract.outputs[0].name][0]]]) {
    kept.push(y);
    if (kept.length > 400) kept.shift();
  }
}

async function run() {
  const me = (running = {});
  status('running');
  name();
  $('again').hidden = true;
  if (isModel() && logits === null) await readPrompt();
  const most = Number($('length').value);
  let frame = performance.now();
  for (let made = 0, piece = ''; made < most && !me.stop; made++) {
    if (isModel()) piece += await writeToken();
    else await layerToken();
    const now = performance.now();
    if (now - frame < FRAME && made + 1 < most) continue;
    elapsed += now - frame;
    if (piece) show(piece);
    piece = '';
    paint();
    await nextFrame();
    frame = performance.now();
  }
  running = null;
  $('again').hidden = false;
  name();
  status('done');
}

/** Whether the prompt is another one than the text began with: then the next run is a new stream. */
const promptChanged = () => isModel() && ($('prompt').value || '\n') !== $('given').textContent;

function name() {
  if (running) $('go').textContent = 'Stop';
  else if (!isModel()) $('go').textContent = position ? 'Go on' : 'Run';
  else $('go').textContent = promptChanged() ? 'Write' : 'Go on';
}

function begin(anew) {
  if (anew) reset();
  run().catch(fail);
}

/** Add text, and keep its end in view unless the reader has scrolled up. Old text goes, so that the page stays quick. */
function show(piece) {
  const box = $('text');
  const follow = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  const whole = $('made').textContent + piece;
  $('made').textContent = whole.length > 20_000 ? `…${whole.slice(-15_000)}` : whole;
  if (follow) box.scrollTop = box.scrollHeight;
}

function fail(error) {
  running = null;
  status('failed');
  $('problem').hidden = false;
  $('problem').textContent = error.message;
  $('go').disabled = true;
  console.error(error);
}

function turnTheme() {
  const dark = matchMedia('(prefers-color-scheme: dark)').matches;
  const root = document.documentElement;
  root.dataset.theme = (root.dataset.theme ?? (dark ? 'dark' : 'light')) === 'dark' ? 'light' : 'dark';
  if (charts) paint();
}

$('theme').addEventListener('click', turnTheme);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => charts && paint());
$('temperature').addEventListener('input', () => ($('degrees').textContent = Number($('temperature').value).toFixed(1)));
$('go').addEventListener('click', () => (running ? (running.stop = true) : begin(promptChanged())));
$('again').addEventListener('click', () => begin(true));
$('prompt').addEventListener('input', name);
$('prompt').addEventListener('keydown', (event) => {
  if (event.key !== 'Enter' || event.shiftKey) return;
  event.preventDefault();
  if (!running) begin(true);
});

try {
  await load();
  reset();
  paint();
  name();
  $('go').disabled = false;
  status('ready');
} catch (error) {
  fail(error);
}
