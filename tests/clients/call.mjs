// Asks a service for a command, and prints what it answers: node call.mjs <subject> <body>
import { connect } from "@nats-io/transport-node";

const { EVENTJET_SERVERS: servers, EVENTJET_USER: user, EVENTJET_INBOX_PREFIX: inboxPrefix } = process.env;
const client = await connect({ servers, ...(user ? { user, pass: user, inboxPrefix } : {}) });
const answer = await client.request(process.argv[2], process.argv[3], { timeout: 60_000 });
console.log(answer.string());
await client.drain();
