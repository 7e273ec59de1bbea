// What an exported file says of itself. Plain JavaScript for browsers and node; no package is needed.
//
// ONNX Runtime's JavaScript packages do not give a file's metadata, so this reads it from the file's bytes: an ONNX file
// is a protobuf message, and its field 14 is a list of (key, value) pairs.

const KEY = 'linattn_edge';
const METADATA = 14;

/** The fields of a protobuf message that have a length: [number, bytes]. Others are skipped. */
function* fields(bytes) {
  let at = 0;
  const varint = () => {
    let value = 0;
    for (let scale = 1; ; scale *= 128) {
      const byte = bytes[at++];
      if (byte === undefined || scale > 2 ** 63) throw new Error('not an ONNX file');
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  };
  while (at < bytes.length) {
    const tag = varint();
    const type = tag % 8;
    if (type === 0) varint();
    else if (type === 1) at += 8;
    else if (type === 5) at += 4;
    else if (type === 2) {
      const length = varint();
      if (at + length > bytes.length) throw new Error('not an ONNX file');
      yield [Math.floor(tag / 8), bytes.subarray(at, at + length)];
      at += length;
    } else throw new Error('not an ONNX file');
  }
}

/** The metadata of an ONNX file, given as a Uint8Array: a Map from key to value. */
export function readMetadata(bytes) {
  const text = new TextDecoder();
  const found = new Map();
  for (const [number, pair] of fields(bytes)) {
    if (number !== METADATA) continue;
    const [key, value] = [new Map(fields(pair))].flatMap((entry) => [entry.get(1), entry.get(2)]);
    found.set(text.decode(key), text.decode(value));
  }
  return found;
}

/** The contract of an exported file: its inputs, outputs and state tensors, and the layers' configuration. */
export function readContract(bytes) {
  const said = readMetadata(bytes).get(KEY);
  if (said === undefined) throw new Error('not written by linattn_export: the file has no contract in its metadata');
  const contract = JSON.parse(said);
  if (contract.format_version !== 1) throw new Error(`format_version ${contract.format_version}: expected 1`);
  return contract;
}

/** How to feed that many tokens: the lengths of the calls. */
export function lengths(contract, total) {
  const most = contract.tokens ?? contract.block_length ?? total;
  if (contract.tokens && total % most) {
    throw new Error(`the file takes ${most} tokens a call; ${total} is no multiple of that`);
  }
  const found = [];
  for (let start = 0; start < total; start += most) found.push(Math.min(most, total - start));
  return found;
}
