// Keeps the conversation in the browser (IndexedDB), so that a reload loses nothing.
const NAME = "epd", STORE = "conversation", KEY = "last";
const MOST_BYTES = 64 << 20; // of a file that is kept whole; of a larger one the server has the bytes

function request(made) {
  return new Promise((resolve, reject) => {
    made.onsuccess = () => resolve(made.result);
    made.onerror = () => reject(made.error);
  });
}

async function store(mode) {
  const opening = indexedDB.open(NAME, 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore(STORE);
  const database = await request(opening);
  return { database, objects: database.transaction(STORE, mode).objectStore(STORE) };
}

async function use(mode, work) {
  const { database, objects } = await store(mode);
  try {
    return await request(work(objects));
  } finally {
    database.close();
  }
}

// turns: {question, answer, facts, media}
export function keep(turns) {
  const media = ({ file, kind, uuid, fileId, address }) => {
    const bytes = file.size <= MOST_BYTES ? file : null;
    return { name: file.name, type: file.type, kind, uuid, fileId, address, bytes };
  };
  const plain = turns.map((turn) => ({
    question: turn.question, answer: turn.answer, facts: turn.facts, media: turn.media.map(media),
  }));
  return use("readwrite", (objects) => objects.put(plain, KEY));
}

// What was kept. A file whose bytes were not is empty here, and has the server's id.
export async function kept() {
  const turns = (await use("readonly", (objects) => objects.get(KEY))) ?? [];
  for (const turn of turns) {
    for (const one of turn.media) one.file = one.bytes ?? new File([], one.name, { type: one.type });
  }
  return turns;
}
