// Numbers as text, as units.py and figures.py write them.

const KIB = 1024, MIB = KIB * 1024, GIB = MIB * 1024;
const WHOLE = new Intl.NumberFormat('en-US', {maximumFractionDigits: 0});
const FOUR_DIGITS = new Intl.NumberFormat('en-US', {maximumSignificantDigits: 4});

function formatCount(count) {
  return WHOLE.format(count);
}

function formatBytes(bytes) {
  for (const [unit, name] of [[GIB, 'GiB'], [MIB, 'MiB'], [KIB, 'KiB']]) {
    const value = bytes / unit;
    if (Math.abs(value) >= 1) return `${value.toFixed(Math.abs(value) < 10 ? 2 : 1)} ${name}`;
  }
  return `${Math.round(bytes)} B`;
}

function formatValue(value, unit) {
  if (value == null) return '–';
  if (unit === 'bytes') return formatBytes(value);
  const digits = Math.abs(value) >= 1000 ? WHOLE.format(value) : FOUR_DIGITS.format(value);
  return unit ? `${digits} ${unit}` : digits;
}

// An axis of seconds reads as a clock; any other holds plain numbers.
function isClock(title) {
  return /second/.test(title);
}

function formatClock(seconds) {
  const whole = Math.round(seconds), two = (number) => String(number).padStart(2, '0');
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

const CLOCK_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800];

// Ticks of bytes stand at 1, 2 or 5 times a power of ten of the unit in which they are written, never at 0.4883 GiB.
function byteSteps(most) {
  const [unit] = unitOf(most);
  return [0.01, 0.1, 1, 10, 100, 1000].flatMap((power) => [1, 2, 5].map((times) => times * power * unit));
}

function unitOf(bytes) {
  return bytes >= GIB ? [GIB, 'GiB'] : bytes >= MIB ? [MIB, 'MiB'] : [KIB, 'KiB'];
}

function formatByteTicks(ticks, most) {
  const [unit, name] = unitOf(most);
  return ticks.map((each) => (each == null ? null : each === 0 ? '0' : `${FOUR_DIGITS.format(each / unit)} ${name}`));
}

function listed(parts) {
  return parts.filter(Boolean).join(', ');
}
