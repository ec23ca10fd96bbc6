// Writes a picture as a PNG with a palette of 256 colours, a third of the size of one without.

import { deflateSync } from "node:zlib";

const COLOURS = 256;

// `pixels` has four bytes per pixel, of which the last, the opacity, is ignored.
export function indexedPng(width, height, pixels) {
  const counts = new Map();
  for (let i = 0; i < pixels.length; i += 4) {
    const colour = (pixels[i] << 16) | (pixels[i + 1] << 8) | pixels[i + 2];
    counts.set(colour, (counts.get(colour) ?? 0) + 1);
  }
  const byCount = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a));
  const palette = spread(byCount);
  const index = new Map(byCount.map((colour) => [colour, nearest(colour, palette)]));
  const rows = Buffer.alloc((width + 1) * height);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const i = (y * width + x) * 4;
      rows[y * (width + 1) + 1 + x] = index.get((pixels[i] << 16) | (pixels[i + 1] << 8) | pixels[i + 2]);
    }
  }
  const header = Buffer.alloc(13);
  header.writeUInt32BE(width, 0);
  header.writeUInt32BE(height, 4);
  header.set([8, 3, 0, 0, 0], 8);
  const colours = Buffer.from(palette.flatMap((colour) => parts(colour)));
  const signature = Buffer.from([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]);
  return Buffer.concat([
    signature, chunk("IHDR", header), chunk("PLTE", colours), chunk("IDAT", deflateSync(rows, { level: 9 })), chunk("IEND", Buffer.alloc(0)),
  ]);
}

const parts = (colour) => [colour >> 16, (colour >> 8) & 255, colour & 255];

function distance(a, b) {
  const [x, y] = [parts(a), parts(b)];
  return (x[0] - y[0]) ** 2 + (x[1] - y[1]) ** 2 + (x[2] - y[2]) ** 2;
}

// The most frequent colours, without those that look like a more frequent one.
function spread(byCount) {
  for (let apart = 0; ; apart = apart ? apart * 2 : 12) {
    const palette = [];
    for (const colour of byCount) {
      if (palette.every((chosen) => distance(chosen, colour) > apart)) palette.push(colour);
      if (palette.length > COLOURS) break;
    }
    if (palette.length <= COLOURS) return palette;
  }
}

function nearest(colour, palette) {
  let best = 0;
  for (let i = 1; i < palette.length; i++) {
    if (distance(palette[i], colour) < distance(palette[best], colour)) best = i;
  }
  return best;
}

function chunk(type, data) {
  const body = Buffer.concat([Buffer.from(type, "latin1"), data]);
  const [length, sum] = [Buffer.alloc(4), Buffer.alloc(4)];
  length.writeUInt32BE(data.length);
  sum.writeUInt32BE(crc32(body));
  return Buffer.concat([length, body, sum]);
}

const TABLE = Array.from({ length: 256 }, (_, n) => {
  let value = n;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? 0xedb88320 ^ (value >>> 1) : value >>> 1;
  return value >>> 0;
});

function crc32(bytes) {
  let sum = 0xffffffff;
  for (const byte of bytes) sum = TABLE[(sum ^ byte) & 255] ^ (sum >>> 8);
  return (sum ^ 0xffffffff) >>> 0;
}
