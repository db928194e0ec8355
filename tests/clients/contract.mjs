// Judges what `eventjet schema export --asyncapi` wrote, as others would: the parser of AsyncAPI, and ajv for bodies.
// contract.mjs asyncapi FILE: the document's faults and what it holds. contract.mjs bodies FILE: of a list of
// [schema, [body, …], [wrong body, …]] the ones that were not judged as they should be.
import { readFileSync } from "node:fs";

const [how, file] = process.argv.slice(2);
const text = readFileSync(file, "utf8");

if (how === "asyncapi") {
  const { Parser } = (await import("@asyncapi/parser")).default;
  const { document, diagnostics } = await new Parser().parse(text);
  const faults = diagnostics.filter((one) => one.severity === 0).map((one) => `${one.path.join("/")}: ${one.message}`);
  const channels = (document?.channels().all() ?? []).map((one) => ({
    id: one.id(),
    address: one.address(),
    messages: one.messages().all().map((each) => [each.name(), each.hasPayload()]),
  }));
  const operations = (document?.operations().all() ?? []).map((one) => [one.id(), one.action()]);
  console.log(JSON.stringify({ faults, channels, operations, title: document?.info().title() }));
} else {
  const { default: Ajv } = await import("ajv/dist/2020.js");
  const { default: formats } = await import("ajv-formats");
  const ajv = formats(new Ajv({ strict: true, allowUnionTypes: true, strictTypes: false, allErrors: true }));
  ajv.addVocabulary(["x-members", "x-order"]);
  for (const word of ["x-event", "x-limits", "x-default", "x-validator", "x-unknown"]) ajv.addKeyword(word);
  const wrong = [];
  for (const [schema, right, others] of JSON.parse(text)) {
    const fits = ajv.compile(schema);
    for (const body of right) if (!fits(JSON.parse(body))) wrong.push([body, ajv.errorsText(fits.errors)]);
    for (const body of others) if (fits(JSON.parse(body))) wrong.push([body, "should not fit"]);
  }
  console.log(JSON.stringify(wrong));
}
