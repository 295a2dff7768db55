// Text files that go in front of the next message: chosen, dropped or pasted, and read in this page. They reach the
// server as a part of the message and in no other way. Knows no conversation and no server.

const $ = (id) => document.getElementById(id);
let attached = []; // { name, text }

// Whoever sends takes them; whoever was refused puts them back.
export function take() {
  const taken = attached;
  attached = [];
  show();
  return taken;
}

export function putBack(files) {
  attached = [...files, ...attached];
  show();
}

// The files, each in a fence longer than any in it, and what is asked of them.
export function inFrontOf(question, files) {
  const documents = files.map(({ name, text }) => {
    const longest = (text.match(/^`{3,}/gm) ?? []).reduce((most, fence) => Math.max(most, fence.length), 2);
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.endsWith("\n") ? text : `${text}\n`}${fence}\n\n`;
  });
  return documents.join("") + question;
}

export function described({ name, text }) {
  return `${name} (${text.length.toLocaleString()} characters)`;
}

// Says in words which of them are no text; the others are attached.
async function attach(files) {
  const refused = [];
  for (const file of files) {
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new TypeError("zero bytes");
      attached.push({ name: file.name, text });
    } catch {
      refused.push(file.name);
    }
  }
  show(refused.length ? `Not a text file in UTF-8: ${refused.join(", ")}` : "");
}

function show(refusal = "") {
  const chips = attached.map((file) => {
    const chip = document.createElement("li");
    const remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "×";
    remove.ariaLabel = `Remove ${file.name}`;
    remove.addEventListener("click", () => {
      attached = attached.filter((other) => other !== file);
      show();
    });
    chip.append(described(file), remove);
    return chip;
  });
  $("attached").replaceChildren(...chips);
  $("attached-refused").textContent = refusal;
}

$("attach").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", async () => {
  await attach([...$("files").files]);
  $("files").value = ""; // so that the same file can be chosen again
  $("message").focus();
});
document.addEventListener("dragover", (event) => {
  if (event.dataTransfer.types.includes("Files")) event.preventDefault();
});
document.addEventListener("drop", (event) => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  attach([...event.dataTransfer.files]);
});
$("message").addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  const isPicture = files.every(({ type }) => type.startsWith("image/")); // Excel and Word put one beside their text
  if (!files.length || (isPicture && event.clipboardData.types.includes("text/plain"))) return;
  event.preventDefault();
  attach(files);
});
