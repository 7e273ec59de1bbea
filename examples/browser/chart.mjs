// Line charts on a canvas, without a library: axes from zero, a legible grid, the value under the pointer.

const PAD = { left: 58, right: 10, top: 10, bottom: 26 };

/** A round number so that about `count` of them fill the span: 1, 2 or 5 times a power of ten, or a power of two. */
function roundStep(span, count, binary = false) {
  const rough = span / count;
  if (binary) return 2 ** Math.ceil(Math.log2(rough));
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5].find((factor) => factor * power >= rough) ?? 10);
}

/**
 * Samples of one number over the position. Past `most` of them, neighbours are merged by their median, so that a chart
 * of a stream of any length stays this small.
 */
export class Series {
  constructor(most = 4096) {
    this.most = most;
    this.clear();
  }

  clear() {
    Object.assign(this, { x: [], y: [], group: 1, waiting: [] });
  }

  add(x, y) {
    this.waiting.push(y);
    if (this.waiting.length < this.group) return;
    this.x.push(x);
    this.y.push(median(this.waiting));
    this.waiting = [];
    if (this.y.length < this.most) return;
    this.group *= 2;
    this.x = this.x.filter((_, i) => i % 2);
    this.y = this.x.map((_, i) => (this.y[2 * i] + this.y[2 * i + 1]) / 2);
  }

  /** The median of each of at most `count` runs of neighbours: [x, y] pairs. */
  smooth(count) {
    const size = Math.max(8, Math.ceil(this.y.length / count));
    const found = [];
    for (let end = this.y.length; end >= size; end -= size) {
      found.push([(this.x[end - size] + this.x[end - 1]) / 2, median(this.y.slice(end - size, end))]);
    }
    return found.reverse();
  }
}

/** The q-quantile of numbers; NaN of none. */
export function quantile(numbers, q) {
  const sorted = Float64Array.from(numbers).sort();
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))] : NaN;
}

/** The median of numbers; NaN of none. */
export const median = (numbers) => quantile(numbers, 0.5);

/**
 * One canvas. draw({ from, to, top, lines, dots }): the positions it spans, the largest value, lines as
 * { points: [[x, y] ...], color }, and a Series as dots. What is above `top` is drawn at the top edge.
 */
export class Chart {
  constructor(canvas, { format, binary = false, center = false }) {
    Object.assign(this, { canvas, format, binary, center, shown: null, pointer: null });
    new ResizeObserver(() => this.redraw()).observe(canvas);
    canvas.addEventListener('pointermove', (event) => this.point(event.offsetX));
    canvas.addEventListener('pointerleave', () => this.point(null));
  }

  point(x) {
    this.pointer = x;
    this.redraw();
  }

  draw(shown) {
    this.shown = shown;
    this.redraw();
  }

  color(name) {
    // what light-dark() comes to just now
    this.canvas.style.color = `var(--${name})`;
    return getComputedStyle(this.canvas).color;
  }

  redraw() {
    const { canvas, shown } = this;
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!shown || !width) return;
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const g = canvas.getContext('2d');
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, width, height);
    g.font = '12px system-ui, "DejaVu Sans", sans-serif';
    g.lineJoin = 'round';

    const { from = 0, to, top } = shown;
    const bottom = this.center ? -top : 0;
    const [w, h] = [width - PAD.left - PAD.right, height - PAD.top - PAD.bottom];
    const toX = (x) => PAD.left + ((x - from) / (to - from)) * w;
    const toY = (y) => PAD.top + (1 - (Math.min(y, top) - bottom) / (top - bottom)) * h;

    const [line, soft] = [this.color('line'), this.color('soft')];
    g.lineWidth = 1;
    const step = roundStep(top - bottom, 4, this.binary);
    g.textAlign = 'right';
    g.textBaseline = 'middle';
    for (let y = Math.ceil(bottom / step) * step; y <= top * 1.0001; y += step) {
      const at = Math.round(toY(y)) + 0.5;
      g.strokeStyle = line;
      g.beginPath();
      g.moveTo(PAD.left, at);
      g.lineTo(width - PAD.right, at);
      g.stroke();
      g.fillStyle = soft;
      g.fillText(this.format(y), PAD.left - 8, at);
    }
    g.textBaseline = 'top';
    g.textAlign = 'center';
    const across = roundStep(to - from, Math.max(2, Math.floor(w / 70)));
    for (let x = Math.ceil(from / across) * across; x <= to; x += across) {
      const label = x.toLocaleString('en');
      const half = g.measureText(label).width / 2;
      g.fillText(label, Math.min(toX(x), width - half), height - PAD.bottom + 8);
    }

    if (shown.dots) {
      g.fillStyle = this.color('first');
      g.globalAlpha = 0.3;
      const { x, y } = shown.dots;
      for (let i = 0; i < x.length; i++) g.fillRect(toX(x[i]) - 1, toY(y[i]) - 1, 2.2, 2.2);
      g.globalAlpha = 1;
    }
    for (const { points, color } of shown.lines) {
      g.strokeStyle = this.color(color);
      g.lineWidth = 2;
      g.beginPath();
      points.forEach(([x, y], i) => (i ? g.lineTo(toX(x), toY(y)) : g.moveTo(toX(x), toY(y))));
      g.stroke();
    }
    this.hint(g, { toX, toY, width, height, line, from, to, w });
  }

  /** The lines' values under the pointer. */
  hint(g, { toX, toY, width, height, line, from, to, w }) {
    if (this.pointer === null || this.center || this.pointer < PAD.left || this.pointer > width - PAD.right) return;
    const x = from + ((this.pointer - PAD.left) / w) * (to - from);
    const near = this.shown.lines.flatMap(({ points, color }) => {
      const after = points.findIndex((p, i) => i && p[0] >= x && points[i - 1][0] <= x);
      if (after < 0) return [];
      const [[x0, y0], [x1, y1]] = [points[after - 1], points[after]];
      return [{ color, at: [x, x1 > x0 ? y0 + ((x - x0) / (x1 - x0)) * (y1 - y0) : y1] }];
    });
    if (!near.length) return;
    g.strokeStyle = line;
    g.lineWidth = 1;
    g.beginPath();
    g.moveTo(this.pointer, PAD.top);
    g.lineTo(this.pointer, height - PAD.bottom);
    g.stroke();
    g.textBaseline = 'middle';
    near.forEach(({ at, color }) => {
      const label = this.format(at[1]);
      const right = toX(at[0]) + 12 + g.measureText(label).width > width;
      g.fillStyle = this.color(color);
      g.beginPath();
      g.arc(toX(at[0]), toY(at[1]), 4, 0, 7);
      g.fill();
      g.textAlign = right ? 'right' : 'left';
      g.fillText(label, toX(at[0]) + (right ? -9 : 9), toY(at[1]) - 11);
    });
  }
}
