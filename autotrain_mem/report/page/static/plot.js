// Turns a model of a figure into options of uPlot. timeline.js, chart.js and bars.js make models; each has
//   x, parts, columns(hidden)   what is drawn: values of each part, and what parts are called
//   range, paths, paint         how: the axis of values, the shape of a line, and what is painted over it
//   rows, reading(point)        what the panel beside it says of a point, row for row
//   home                        the point that the panel speaks of while nobody points at another

function plotOptions(model, look, {width, height, hidden, hooks = {}}) {
  return {
    width, height,
    padding: [model.headroom * look.scale, 26 * look.scale, 0, 0],
    legend: {show: false, live: false},
    cursor: {y: false, points: {show: false}, drag: {x: !model.rowNames, y: false, dist: 4}},
    focus: {alpha: 1},
    scales: {
      x: {time: false, range: (_, low, high) => xRange(model, low, high)},
      y: {range: (_, low, high) => model.range(low, high)},
    },
    axes: [xAxis(model, look), yAxis(model, look)],
    series: [{}, ...model.parts.map((part, index) => seriesOptions(model, part, index, look, hidden))],
    hooks: {...hooks, draw: [(plot) => paintWith(plot, look, (pen) => model.paint(pen, hidden)), ...(hooks.draw || [])]},
  };
}

// All of it, or what was zoomed into. A run with one moment has an axis too.
function xRange({x, ends, rowNames}, low, high) {
  const isWhole = rowNames || (low <= x[0] && high >= x[x.length - 1]), [first, last] = isWhole ? ends : [low, high];
  return first === last ? [first - 0.5, last + 0.5] : [first, last];
}

function seriesOptions(model, part, index, look, hidden) {
  const colour = look.colour(part.colour), hasDots = model.hasDots ? model.hasDots(index) : false;
  return {
    show: !hidden.has(index),
    stroke: colour,
    width: (part.isArea ? 1 : 1.75) * look.scale,
    dash: part.isArea ? undefined : part.dash.map((each) => each * look.scale),
    fill: part.isArea ? colour : undefined,
    spanGaps: true,
    paths: model.paths(),
    points: {show: hasDots, size: 5 * look.scale, fill: colour, stroke: colour},
  };
}

function axisLook(look) {
  return {
    stroke: look.colour('soft'), font: fontOf(look), labelFont: fontOf(look),
    grid: {stroke: look.colour('line'), width: 1}, ticks: {show: false},
    gap: 7 * look.scale, labelSize: 20 * look.scale,
  };
}

function xAxis(model, look) {
  const common = {...axisLook(look), size: 30 * look.scale, space: 90 * look.scale, label: model.xTitle || undefined};
  common.grid = {show: false};
  if (model.rowNames) {
    return {...common, splits: () => model.x, values: (plot) => model.rowNames.map((name) => fitted(plot, model, look, name))};
  }
  const format = (_, ticks) => ticks.map((tick) => (tick == null ? null : model.formatX(tick)));
  return {...common, values: format, ...(model.isClock ? {incrs: CLOCK_STEPS} : {})};
}

function fitted(plot, model, look, name) {
  const letters = Math.floor(plot.bbox.width / devicePixelRatio / model.x.length / (6.6 * look.scale));
  return name.length <= letters ? name : `${name.slice(0, Math.max(letters - 1, 1))}…`;
}

function yAxis(model, look) {
  const isBytes = model.unit === 'bytes';
  return {
    ...axisLook(look), space: 44 * look.scale,
    size: (_, labels) => Math.max(40, 12 + 6.8 * Math.max(...(labels || ['']).map((label) => (label || '').length))) * look.scale,
    values: (plot, ticks) => (isBytes ? formatByteTicks(ticks, plot.scales.y.max) : ticks.map((tick) => (tick == null ? null : formatValue(tick, '')))),
    ...(isBytes ? {incrs: (_, axis, low, high) => byteSteps(high)} : {}),
  };
}
