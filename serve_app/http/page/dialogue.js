// Keeps the turns of a dialogue. A medium is sent once, with a name, and by that name alone from then on.
function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

// Not crypto.randomUUID: it is for pages from this machine or over TLS.
export function newName() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function part({ file, kind, uuid, isKept }) {
  const type = `${kind}_url`;
  return isKept ? { type, uuid } : { type, uuid, [type]: { url: await dataUrl(file) } };
}

// Media first: every further question about them finds their part of the prompt computed.
async function message({ media, question }) {
  return { role: "user", content: [...(await Promise.all(media.map(part))), { type: "text", text: question }] };
}

export class Dialogue {
  constructor() {
    this.turns = []; // {media, question, answer}
  }

  get media() {
    return this.turns.flatMap((turn) => turn.media);
  }

  // The media that no earlier question was about are those of this one.
  turn(media, question) {
    const earlier = this.media;
    return { media: media.filter((entry) => !earlier.includes(entry)), question };
  }

  async messages(turn) {
    const messages = [];
    for (const each of this.turns) messages.push(await message(each), { role: "assistant", content: each.answer });
    return [...messages, await message(turn)];
  }

  add(turn, answer) {
    this.turns.push({ ...turn, answer });
  }

  clear() {
    this.turns = [];
  }
}
