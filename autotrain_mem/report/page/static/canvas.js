// What figures draw themselves over uPlot's canvas. All places are in CSS pixels; `look` says colours and scale.

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif';

function fontOf(look, weight = 400) {
  return `${weight} ${Math.round(12 * look.scale)}px ${FONT}`;
}

function penOf(plot, look) {
  const {ctx, bbox} = plot, ratio = devicePixelRatio;
  const box = {
    left: bbox.left / ratio, top: bbox.top / ratio,
    right: (bbox.left + bbox.width) / ratio, bottom: (bbox.top + bbox.height) / ratio,
  };
  const x = (value) => plot.valToPos(value, 'x', true) / ratio;
  const y = (value) => plot.valToPos(value, 'y', true) / ratio;
  return {ctx, box, look, x, y, isShown: (value) => value >= plot.scales.x.min && value <= plot.scales.x.max};
}

function paintWith(plot, look, paint) {
  const {ctx} = plot;
  ctx.save();
  ctx.scale(devicePixelRatio, devicePixelRatio);
  paint(penOf(plot, look));
  ctx.restore();
}

function drawLine({ctx, look}, [x1, y1], [x2, y2], colour, {dash = [], width = 1} = {}) {
  ctx.beginPath();
  ctx.setLineDash(dash.map((each) => each * look.scale));
  ctx.lineWidth = width * look.scale;
  ctx.strokeStyle = look.colour(colour);
  ctx.moveTo(x1, y1);
  ctx.lineTo(x2, y2);
  ctx.stroke();
  ctx.setLineDash([]);
}

// A rim in the colour of the ground keeps words readable where they lie on an area.
function drawText({ctx, look}, text, x, y, {colour = 'ink', align = 'left', weight = 400, rim = true} = {}) {
  ctx.font = fontOf(look, weight);
  ctx.textAlign = align;
  ctx.textBaseline = 'middle';
  if (rim) {
    ctx.lineJoin = 'round';
    ctx.lineWidth = 4 * look.scale;
    ctx.strokeStyle = look.colour('ground');
    ctx.strokeText(text, x, y);
  }
  ctx.fillStyle = look.colour(colour);
  ctx.fillText(text, x, y);
}

function textWidth({ctx, look}, text, weight = 400) {
  ctx.font = fontOf(look, weight);
  return ctx.measureText(text).width;
}

// Horizontal lines with their names. One that lies above the figure is named at the upper edge, with an arrow; where
// two names would lie on one another, the lower goes below its line, or to the left of the other.
function drawLimits(pen, limits, unit) {
  const taken = [];
  for (const [name, value] of [...limits].sort(([, one], [, other]) => other - one)) {
    const {box} = pen, height = pen.y(value), isAbove = height < box.top - 1, colour = name === 'budget' ? 'bad' : 'soft';
    if (!isAbove) drawLine(pen, [box.left, height], [box.right, height], colour, {dash: [6, 4], width: 1.5});
    const text = `${name} ${formatValue(value, unit)}${isAbove ? ' ↑' : ''}`;
    const {right, middle} = freePlace(pen, isAbove ? box.top : height, textWidth(pen, text, 600), taken);
    drawText(pen, text, right, middle, {colour, align: 'right', weight: 600});
  }
}

function freePlace({box, look}, height, width, taken) {
  const room = 9 * look.scale, places = [height - room, height + room].filter((middle) => middle > box.top);
  const meets = (middle) => taken.filter((each) => Math.abs(each.middle - middle) < 1.7 * room);
  const middle = places.find((each) => !meets(each).length) ?? places[0];
  const right = Math.min(box.right - 4, ...meets(middle).map((each) => each.left - room));
  taken.push({middle, left: right - width});
  return {right, middle};
}

function drawVertical(pen, name, value) {
  if (!pen.isShown(value)) return;
  const {box, look} = pen, at = pen.x(value), toLeft = at > (box.left + box.right) / 2;
  drawLine(pen, [at, box.top], [at, box.bottom], 'accent', {dash: [6, 4], width: 1.5});
  const place = at + (toLeft ? -6 : 6) * look.scale;
  drawText(pen, name, place, box.top + 10 * look.scale, {colour: 'accent', align: toLeft ? 'right' : 'left', weight: 600});
}

// The upper end of an axis of values: a limit far above them would press them flat, and is only named.
function ceilingOf(most, limits) {
  const near = Object.values(limits).filter((each) => each <= 2.5 * most);
  return (Math.max(most, ...near) || 1) * 1.07;
}
