// Lines over a common axis, with limits, verticals, and marks for what happened in a run.

const SIGNS = {'out of memory': ['▼', 'bad'], restart: ['●', 'accent'], checkpoint: ['■', 'soft'], warning: ['◆', 'series-2']};

function signOf(kind) {
  return SIGNS[kind] || ['▲', 'soft'];
}

function chartModel(data) {
  const {x, series, unit} = data, limits = Object.entries(data.limits), verticals = Object.entries(data.verticals || {});
  const known = series.flatMap((each) => each.values.filter((value) => value != null));
  const held = series.map((each) => lastKnown(each.values));
  const pointOfMark = data.marks.map((mark) => nearest(x, mark.seconds));
  const isFromZero = (unit === 'bytes' || data.steps) && known.every((value) => value >= 0);
  return {
    x, ends: endsOf(x, data.marks), xTitle: isClock(data.x_title) ? 'time' : data.x_title, yTitle: data.y_title, unit, height: 300, headroom: 24,
    home: Math.max(x.length - 1, 0), holderSlots: 0, isClock: isClock(data.x_title),
    hasMarks: data.marks.length > 0,
    parts: series.map(({name}, index) => ({name, colour: seriesColour(index), dash: seriesDash(index)})),
    rows: [...series.map((_, part) => ({part})), ...limits.map(([name]) => ({sum: name}))],
    formatX: isClock(data.x_title) ? formatClock : (value) => formatValue(value, ''),
    range: (low, high) => chartRange(low, high, known, isFromZero, data.limits),
    columns: () => series.map((each) => each.values),
    paths: () => (data.steps ? uPlot.paths.stepped({align: 1}) : uPlot.paths.linear()),
    hasDots: (part) => series[part].values.filter((value) => value != null).length <= 40,
    paint: (pen) => {
      drawLimits(pen, limits, unit);
      for (const [name, value] of verticals) drawVertical(pen, name, value);
      for (const mark of data.marks) drawMark(pen, mark);
      if (data.y_title.toLowerCase() === data.title.toLowerCase()) return; // which stands above it
      drawText(pen, data.y_title, pen.box.left, pen.box.top - 13 * pen.look.scale, {colour: 'soft', rim: false});
    },
    // Keys come to a mark at the point next to it; a mouse also when it is as near as `reach`.
    reading: (point, reach = 0) => ({
      where: isClock(data.x_title) ? formatClock(x[point]) : formatValue(x[point], ''),
      place: isClock(data.x_title) ? 'since the start' : data.x_title,
      values: [...held.map((values) => formatValue(values[point], unit)), ...limits.map(([, value]) => formatValue(value, unit))],
      holders: [],
      marked: data.marks
        .filter(({seconds}, index) => pointOfMark[index] === point || Math.abs(seconds - x[point]) <= reach)
        .map(({kind, step, text}) => `${signOf(kind)[0]} ${kind}, step ${formatCount(step)}: ${text}`),
    }),
  };
}

function chartRange(low, high, known, isFromZero, limits) {
  if (!known.length) return [0, 1];
  if (isFromZero) return [0, ceilingOf(Math.max(...known), limits)];
  const near = Object.values(limits), bottom = Math.min(low ?? 0, ...near), top = Math.max(high ?? 1, ...near);
  const rim = (top - bottom || Math.abs(top) || 1) * 0.08;
  return [bottom - rim, top + rim];
}

// A run starts before its first value, and ends after its last: what is marked there is in sight too.
function endsOf(x, marks) {
  const seconds = marks.map((mark) => mark.seconds);
  return [Math.min(x[0], ...seconds), Math.max(x[x.length - 1], ...seconds)];
}

// Where nothing was measured a line still holds what was measured last.
function lastKnown(values) {
  let last = null;
  return values.map((value) => (last = value ?? last));
}

function nearest(ascending, value) {
  let low = 0, high = ascending.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ascending[middle] < value) low = middle + 1;
    else high = middle;
  }
  const isBefore = low > 0 && value - ascending[low - 1] < ascending[low] - value;
  return isBefore ? low - 1 : low;
}

function drawMark(pen, {seconds, kind}) {
  if (!pen.isShown(seconds)) return;
  const {box, look} = pen, [sign, colour] = signOf(kind), at = pen.x(seconds);
  drawLine(pen, [at, box.top], [at, box.bottom], colour, {dash: [2, 3]});
  drawText(pen, sign, at, box.top + 5 * look.scale, {colour, align: 'center', weight: 700});
}
