// A figure as a picture of its own: title, legend, axes and source, light, and wide enough for a slide.

const PICTURE = {width: 1600, scale: 1.5, rim: 40};

async function savePng(view) {
  const canvas = await pictureOf(view);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, 'image/png'));
  const link = make('a');
  link.href = URL.createObjectURL(blob);
  link.download = `autofit-${view.data.key}.png`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

async function pictureOf(view) {
  const look = {colour: coloursOf('light'), scale: PICTURE.scale}, canvas = make('canvas'), ctx = canvas.getContext('2d');
  const width = PICTURE.width - 2 * PICTURE.rim, height = Math.round(view.model.height * PICTURE.scale);
  const legend = legendPlaces(ctx, look, view, width), head = 64 + legend.height + 20;
  const plot = await drawnPlot(view, look, width, height);
  canvas.width = PICTURE.width;
  canvas.height = head + height + 56;
  ctx.fillStyle = look.colour('ground');
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  drawHead(ctx, look, view, canvas);
  for (const place of legend.places) drawLegend(ctx, look, place);
  ctx.drawImage(plot.ctx.canvas, PICTURE.rim, head, width, height);
  plot.destroy();
  return canvas;
}

// uPlot draws a moment after it is made. It is drawn out of sight, so that no reader sees it come and go.
function drawnPlot(view, look, width, height) {
  const range = view.plot ? view.plot.scales.x : null;
  return new Promise((resolve) => {
    const hooks = {draw: [(plot) => queueMicrotask(() => resolve(plot))]};
    const options = plotOptions(view.model, look, {width, height, hidden: view.hidden, hooks});
    if (range && view.isZoomed()) options.scales.x.range = () => [range.min, range.max];
    new uPlot(options, [view.model.x, ...view.model.columns(view.hidden)], make('div'));
  });
}

function drawHead(ctx, look, view, canvas) {
  ctx.textBaseline = 'alphabetic';
  ctx.textAlign = 'left';
  ctx.fillStyle = look.colour('ink');
  ctx.font = `650 28px ${FONT}`;
  ctx.fillText(view.data.title, PICTURE.rim, 52);
  ctx.fillStyle = look.colour('soft');
  ctx.font = `400 18px ${FONT}`;
  ctx.fillText(`${view.pageTitle} · autofit`, PICTURE.rim, canvas.height - 18, canvas.width - 2 * PICTURE.rim);
}

function legendPlaces(ctx, look, view, width) {
  ctx.font = fontOf(look);
  const places = [];
  let x = PICTURE.rim, y = 88;
  view.model.parts.forEach((part, index) => {
    if (view.hidden.has(index)) return;
    const wide = ctx.measureText(part.name).width + 52;
    if (x + wide > PICTURE.rim + width) [x, y] = [PICTURE.rim, y + 28];
    places.push({part, x, y});
    x += wide;
  });
  return {places, height: y - 88 + 28};
}

function drawLegend(ctx, look, {part, x, y}) {
  ctx.fillStyle = ctx.strokeStyle = look.colour(part.colour);
  if (part.isArea) ctx.fillRect(x, y - 8, 16, 16);
  else {
    ctx.lineWidth = 3;
    ctx.setLineDash(part.dash);
    ctx.beginPath();
    ctx.moveTo(x, y);
    ctx.lineTo(x + 22, y);
    ctx.stroke();
    ctx.setLineDash([]);
  }
  ctx.font = fontOf(look);
  ctx.textBaseline = 'middle';
  ctx.fillStyle = look.colour('ink');
  ctx.fillText(part.name, x + 28, y);
}
