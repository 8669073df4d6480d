// Keeps the turns of a dialogue, and makes of them the messages of a request.

// Media first: every further question about them finds their part of the prompt computed.
async function message({ media, question }, inline) {
  return { role: "user", content: [...(await Promise.all(media.map((one) => one.part(inline)))), { type: "text", text: question }] };
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

  // system: a prompt before all, or empty. inline: see `Medium.part`.
  async messages(turn, system, inline) {
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const each of this.turns) {
      if (each === turn) break;
      messages.push(await message(each, inline), { role: "assistant", content: each.answer });
    }
    return [...messages, await message(turn, inline)];
  }

  add(turn) {
    this.turns.push(turn);
  }

  clear() {
    this.turns = [];
  }
}
