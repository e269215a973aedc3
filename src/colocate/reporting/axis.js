// Axes, numbers as text, smoothing and thinning, for charts that are drawn anew: in the page they do what
// axes.py and curves.py have done for the charts of the whole run.
"use strict";

const niceStep = (raw) => {
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= raw * (1 - 1e-9));
};

const compact = (value, digits = 3) => {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  for (const [least, unit, suffix] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]) {
    if (size >= least) return `${Number((value / unit).toPrecision(digits))}${suffix}`;
  }
  if (size < 1e-3) return value.toExponential(digits - 1);
  return size >= 10 ** (digits - 1) ? value.toFixed(0) : `${Number(value.toPrecision(digits))}`;
};

// A value with as many decimals as tell it from its neighbours one step away.
const decimals = (value, step) => {
  let count = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  if (Math.abs(step * 10 ** count - Math.round(step * 10 ** count)) > 1e-6) count += 1; // a step of 2.5
  return value.toFixed(count);
};

class Axis {
  constructor(low, high, ticks, { log = false, percent = false } = {}) {
    Object.assign(this, { low, high, ticks, log, percent });
  }

  // An axis that holds the values from low to high; `tight`: it ends there, not at ticks around them.
  static around(low, high, { tight = false, whole = false, log = false, percent = false, numTicks = 5 } = {}) {
    if (!(low <= high)) [low, high] = log ? [1, 1] : [0, 1];
    if (log) {
      const first = Math.floor(Math.log10(low) + 1e-9);
      const last = Math.max(Math.ceil(Math.log10(high) - 1e-9), first + 1);
      const stride = Math.max(1, Math.ceil((last - first) / numTicks));
      const ticks = [];
      for (let power = first; power <= last; power += stride) ticks.push(10 ** power);
      return new Axis(10 ** first, 10 ** last, ticks, { log });
    }
    if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) {
      const margin = 0.1 * Math.abs(high) || 0.5;
      [low, high] = [low - margin, high + margin];
    }
    let step = niceStep(Math.max((high - low) / numTicks, whole ? 1 : 0));
    if (whole && step === 2.5) step = 5;
    if (!tight) {
      low = Math.floor(low / step + 1e-6) * step;
      high = Math.ceil(high / step - 1e-6) * step;
    }
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-6); i <= Math.floor(high / step + 1e-6); i++) ticks.push(i * step);
    return new Axis(low, high, ticks, { percent });
  }

  // The position of a value between the ends: 0 at the low one, 1 at the high one.
  fraction(value) {
    if (!this.log) return (value - this.low) / (this.high - this.low);
    return Math.log(Math.max(value, this.low) / this.low) / Math.log(this.high / this.low);
  }

  text(tick) {
    if (this.percent) {
      if (this.ticks.length < 2 || !tick) return `${compact(100 * tick)}%`;
      return `${decimals(100 * tick, 100 * (this.ticks[1] - this.ticks[0]))}%`;
    }
    if (this.log || this.ticks.length < 2) return compact(tick).replace(".00e", "e");
    const step = this.ticks[1] - this.ticks[0];
    const largest = Math.max(Math.abs(this.low), Math.abs(this.high));
    if (Math.abs(tick) < step * 1e-6) return "0";
    for (const [unit, suffix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (largest >= Math.max(1e4, unit)) return decimals(tick / unit, step / unit) + suffix;
    }
    if (largest >= 1e-3) return decimals(tick, step);
    const power = Math.floor(Math.log10(largest));
    return `${decimals(tick / 10 ** power, step / 10 ** power)}e${power}`;
  }
}

// Mean of `window` values around each, of fewer at the ends. A gap stays a gap, and does not count.
const runningMean = (ys, window, weights) => {
  const sums = new Float64Array(ys.length + 1);
  const totals = new Float64Array(ys.length + 1);
  ys.forEach((y, i) => {
    const weight = Number.isFinite(y) ? (weights ? weights[i] : 1) : 0;
    sums[i + 1] = sums[i] + (weight ? weight * y : 0);
    totals[i + 1] = totals[i] + weight;
  });
  const half = Math.floor(window / 2);
  return Float64Array.from(ys, (y, i) => {
    const [first, last] = [Math.max(0, i - half), Math.min(ys.length, i + half + 1)];
    const total = totals[last] - totals[first];
    return Number.isFinite(y) && total ? (sums[last] - sums[first]) / total : NaN;
  });
};

// Exponential moving average, in which a value counts `kept` times as much as the one after it. The weights of
// all values so far are divided by, so that the average begins at the first value and not at zero.
const movingAverage = (ys, kept, weights) => {
  let [sum, total] = [0, 0];
  return Float64Array.from(ys, (y, i) => {
    if (!Number.isFinite(y)) return NaN;
    const weight = weights ? weights[i] : 1;
    sum = kept * sum + weight * y;
    total = kept * total + weight;
    return total ? sum / total : NaN;
  });
};

// Which of the rows from `first` to before `end` a line through them needs: of each column of pixels the first,
// the lowest, the highest and the last, so that a peak of one step stays. Rows between which there is a gap are
// kept apart by a row of the gap.
const thin = (ys, first, end, columnOf) => {
  const rows = [];
  for (let i = first; i < end; ) {
    const column = columnOf(i);
    let [low, high, head, last] = [-1, -1, -1, -1];
    const start = i;
    for (; i < end && columnOf(i) === column; i++) {
      if (!Number.isFinite(ys[i])) continue;
      if (head < 0) head = low = high = i;
      if (ys[i] < ys[low]) low = i;
      if (ys[i] > ys[high]) high = i;
      last = i;
    }
    if (head < 0) rows.push(start);
    else rows.push(...[...new Set([head, low, high, last])].sort((a, b) => a - b));
  }
  return rows;
};

// The first row whose x is at least (or, `after`, above) a value.
const rowAt = (xs, value, after = false) => {
  let [low, high] = [0, xs.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < value || (after && xs[middle] === value)) low = middle + 1;
    else high = middle;
  }
  return low;
};
