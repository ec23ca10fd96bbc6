/** The TypeScript in README.md and the guides compiles. */

import assert from "node:assert/strict";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { basename, join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import ts from "typescript";

const root = fileURLToPath(new URL("../..", import.meta.url));
const DOCUMENTS = ["README.md", "../../docs/guides/typescript.md", "../../docs/guides/from-bullmq.md"];

/** What examples import that they do not show. */
const MAIL =
  "export declare function mail(to: string, copies: number, options: { signal: AbortSignal }): Promise<void>;\n";

for (const document of DOCUMENTS) {
  test(`the examples of ${basename(document)} compile`, () => {
    const folder = join(root, "build/documents", basename(document, ".md"));
    mkdirSync(folder, { recursive: true });
    const text = readFileSync(join(root, document), "utf8");
    const files: string[] = [join(folder, "mail.ts")];
    writeFileSync(join(folder, "mail.ts"), MAIL);
    for (const [, block = ""] of text.matchAll(/^```ts\n(.*?)^```/gms)) {
      // A block that others import starts with its name.
      const name = /^\/\/ ([\w-]+\.ts)\n/.exec(block)?.[1] ?? `block-${files.length}.ts`;
      const file = join(folder, name);
      writeFileSync(file, `${block}\nexport {};\n`);
      files.push(file);
    }
    assert.ok(files.length > 1, "the document has examples");
    const { config } = ts.readConfigFile(join(root, "tsconfig.json"), (path) =>
      readFileSync(path, "utf8"),
    ) as {
      config: { compilerOptions: object };
    };
    const { options } = ts.convertCompilerOptionsFromJson(config.compilerOptions, root);
    const program = ts.createProgram(files, { ...options, noEmit: true, rootDir: root });
    const problems = ts.getPreEmitDiagnostics(program).map((problem) => {
      const message = ts.flattenDiagnosticMessageText(problem.messageText, "\n");
      if (!problem.file) return message;
      const { line } = problem.file.getLineAndCharacterOfPosition(problem.start ?? 0);
      return `${basename(problem.file.fileName)}:${line + 1}: ${message}`;
    });
    assert.deepEqual(problems, []);
  });
}
