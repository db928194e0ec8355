// Reads a stream as clients do, and prints each message as a line of JSON:
//   node log.mjs <how> <stream> <subject> <how many, or all>
// where <how> is one of the roads below.
import { AckPolicy, DeliverPolicy, jetstream, jetstreamManager } from "@nats-io/jetstream";
import { connect } from "@nats-io/transport-node";

const [how, stream, subject, count] = process.argv.slice(2);
const client = await connect({ servers: process.env.EVENTJET_SERVERS });
const js = jetstream(client);
const { consumers } = await jetstreamManager(client);
const made = {
  filter_subject: subject,
  ack_policy: AckPolicy.Explicit,
  deliver_policy: DeliverPolicy.All,
  ack_wait: 120e9,
};

function tell(message, by = "") {
  const headers = Object.fromEntries([...message.headers].map(([name, values]) => [name, values.join()]));
  console.log(JSON.stringify({ position: message.seq, subject: message.subject, headers, body: message.string(), by }));
}

// Waits for the server's word, so that it is known where another one goes on.
async function acknowledge(message) {
  if (!(await message.ackAck())) throw new Error("the server did not take an acknowledgement");
}

// All that a consumer has is read when nothing more is pending.
async function readAll(messages, after = async () => {}) {
  for await (const message of messages) {
    tell(message);
    await after(message);
    if (message.info.pending === 0) break;
  }
}

// So many and no more are asked for, since what is delivered and not acknowledged is kept from others for a while.
async function readDurable(consumer) {
  if (count === "all") return readAll(await consumer.consume(), acknowledge);
  for await (const message of await consumer.fetch({ max_messages: Number(count), expires: 60_000 })) {
    tell(message);
    await acknowledge(message);
  }
}

// What a queue group has is read when all its members together have all of it. One message is on its way at a time, so
// that whoever comes first does not take them all.
async function readInGroup() {
  const group = { durable_name: "group", deliver_subject: `told.${stream}`, deliver_group: "readers" };
  let left = (await consumers.add(stream, { ...made, ...group, max_ack_pending: 1 })).num_pending;
  const members = [];
  for (const by of ["one", "two"]) {
    members.push({ by, messages: await (await js.consumers.getPushConsumer(stream, "group")).consume() });
  }
  const readAs = async ({ by, messages }) => {
    for await (const message of messages) {
      tell(message, by);
      await acknowledge(message);
      left -= 1;
      if (left === 0) members.forEach((each) => each.messages.stop());
    }
  };
  await Promise.all(members.map(readAs));
}

const roads = {
  "pull-durable": async () => {
    await consumers.add(stream, { ...made, durable_name: "export" });
    await readDurable(await js.consumers.get(stream, "export"));
  },
  "pull-ephemeral": async () => {
    const { name } = await consumers.add(stream, made);
    await readAll(await (await js.consumers.get(stream, name)).consume(), acknowledge);
  },
  "pull-ordered": async () => {
    await readAll(await (await js.consumers.get(stream, { filter_subjects: subject })).consume());
  },
  "push-durable": async () => {
    await consumers.add(stream, { ...made, durable_name: "watch", deliver_subject: `told.${stream}` });
    await readAll(await (await js.consumers.getPushConsumer(stream, "watch")).consume(), acknowledge);
  },
  "push-ordered": async () => {
    await readAll(await (await js.consumers.getPushConsumer(stream, { filter_subjects: subject })).consume());
  },
  "push-group": readInGroup,
};
await roads[how]();
await client.close();
