// A group of bars for each row.

function barsModel(data) {
  const {rows, series, unit} = data, limits = Object.entries(data.limits);
  const known = series.flatMap((each) => each.values.filter((value) => value != null));
  const low = Math.min(0, ...known), top = ceilingOf(Math.max(0, ...known), data.limits);
  return {
    x: rows.map((_, row) => row), ends: [-0.5, rows.length - 0.5], xTitle: '', unit, height: 300, headroom: 12, home: highestRow(series), holderSlots: 0, rowNames: rows,
    parts: series.map(({name}, index) => ({name, colour: seriesColour(index), isArea: true})),
    rows: [...series.map((_, part) => ({part})), ...limits.map(([name]) => ({sum: name}))],
    formatX: (row) => rows[row] ?? '',
    range: () => [low * 1.07, top],
    columns: () => series.map((each) => each.values),
    paths: () => () => null, // the bars are painted below, beside one another
    paint: (pen, hidden) => {
      drawBars(pen, series, hidden);
      drawLimits(pen, limits, unit);
    },
    reading: (row) => ({
      where: rows[row], place: '',
      values: [...series.map((each) => formatValue(each.values[row], unit)), ...limits.map(([, value]) => formatValue(value, unit))],
      holders: [], marked: [],
    }),
  };
}

function highestRow(series) {
  const values = series[0].values.map((value) => value ?? -Infinity);
  return values.indexOf(Math.max(...values));
}

function drawBars(pen, series, hidden) {
  const {ctx, look} = pen, shown = series.map((_, index) => index).filter((index) => !hidden.has(index));
  const group = Math.min(pen.x(1) - pen.x(0), 160 * look.scale) * 0.72, width = Math.min(group / shown.length, 44 * look.scale);
  shown.forEach((index, place) => {
    ctx.fillStyle = look.colour(seriesColour(index));
    series[index].values.forEach((value, row) => {
      if (value == null) return;
      const left = pen.x(row) + (place - shown.length / 2) * width;
      ctx.fillRect(left, Math.min(pen.y(value), pen.y(0)), width - 2, Math.max(Math.abs(pen.y(0) - pen.y(value)), 1));
    });
  });
}
