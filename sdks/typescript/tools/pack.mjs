// Builds the npm packages: one with the program for each platform, and `longshore`, which names them as optional
// dependencies. Each --binary is a path, for the platform of this computer, or PLATFORM=PATH, for example
// linux-arm64=target/release/longshore. With --publish, publishes them: first the platforms, then `longshore`.
//
//   npm run pack:platform -- --binary ../../target/release/longshore
//   npm run pack:platform -- --binary linux-x64=… --binary darwin-arm64=… --publish

import { spawnSync } from "node:child_process";
import { chmodSync, cpSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

const root = fileURLToPath(new URL("..", import.meta.url));
const { values } = parseArgs({
  options: {
    binary: { type: "string", multiple: true, default: [] },
    out: { type: "string", default: join(root, "out") },
    publish: { type: "boolean", default: false },
  },
});
if (values.binary.length === 0) {
  console.error("name the program with --binary PATH or --binary PLATFORM=PATH");
  process.exit(2);
}
const out = resolve(values.out);
rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });

const manifest = JSON.parse(readFileSync(join(root, "package.json"), "utf8"));
const { version, license } = manifest;
run(process.execPath, [join(root, "tools/build.mjs")], root);

const tarballs = [];
const optionalDependencies = {};
for (const each of values.binary) {
  const [platform, path] = each.includes("=")
    ? each.split("=")
    : [`${process.platform}-${process.arch}`, each];
  const [os, cpu] = platform.split("-");
  const name = `@longshore/${platform}`;
  const folder = join(out, platform);
  const program = os === "win32" ? "longshore.exe" : "longshore";
  mkdirSync(join(folder, "bin"), { recursive: true });
  cpSync(resolve(path), join(folder, "bin", program));
  chmodSync(join(folder, "bin", program), 0o755);
  const description = `The program longshore for ${platform}. Install the package longshore, which uses it.`;
  const files = ["bin"];
  write(folder, { name, version, description, license, os: [os], cpu: [cpu], files, preferUnplugged: true });
  tarballs.push(pack(folder));
  optionalDependencies[name] = version;
}

const folder = join(out, "longshore");
for (const part of ["dist", "bin", "README.md", "CHANGELOG.md"]) {
  cpSync(join(root, part), join(folder, part), { recursive: true });
}
const { scripts: _scripts, devDependencies: _dev, ...published } = manifest;
write(folder, { ...published, optionalDependencies });
tarballs.push(pack(folder));

for (const tarball of tarballs) console.log(tarball);
if (values.publish)
  for (const tarball of tarballs) run("npm", ["publish", tarball, "--access", "public"], out);

function write(folder, content) {
  writeFileSync(join(folder, "package.json"), `${JSON.stringify(content, null, 2)}\n`);
}

function pack(folder) {
  const { stdout } = run("npm", ["pack", "--json", "--pack-destination", out], folder, "pipe");
  return join(out, JSON.parse(stdout)[0].filename);
}

function run(program, args, cwd, stdout = "inherit") {
  const result = spawnSync(program, args, { cwd, stdio: ["ignore", stdout, "inherit"], encoding: "utf8" });
  if (result.status !== 0) process.exit(result.status ?? 1);
  return result;
}
