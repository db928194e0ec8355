// Emmett on PostgreSQL: node emmett.mjs commands|fill|run <store> <file of postings> <tasks>
// Commands go through its CommandHandler; the read model is its raw SQL projection, made by rebuildPostgreSQLProjections.
// It keeps read models in the database of its store. A posting is a line of JSON: [account, is deposit, tx id, amount, memo].
import { readFileSync } from 'node:fs';
import { pathToFileURL } from 'node:url';
import { createRequire } from 'node:module';

const installed = createRequire(pathToFileURL(process.env.BENCH_NODE + '/').href);
const load = async (name) => import(pathToFileURL(installed.resolve(name)).href);
const { CommandHandler } = await load('@event-driven-io/emmett');
const { getPostgreSQLEventStore, postgreSQLRawSQLProjection, rebuildPostgreSQLProjections } = await load('@event-driven-io/emmett-postgresql');
const { SQL } = await load('@event-driven-io/dumbo');
const pg = (await load('pg')).default;

const [job, store_url, file, tasks = '1'] = process.argv.slice(2);
const postings = readFileSync(file, 'utf8').trim().split('\n').map((line) => JSON.parse(line));
const cents = (text) => Math.round(parseFloat(text) * 100);

const initialState = () => ({ balance: 0 });
const evolve = (state, { type, data }) =>
  type === 'Deposited' ? { balance: state.balance + cents(data.amount) }
  : type === 'Withdrawn' ? { balance: state.balance - cents(data.amount) }
  : state;
const eventOf = ([account_id, is_deposit, tx_id, amount, memo]) => ({
  type: is_deposit ? 'Deposited' : 'Withdrawn',
  data: { account_id, tx_id, amount, currency: 'EUR', memo },
});

const store = getPostgreSQLEventStore(store_url);
await store.schema.migrate();

const cpu_s = () => { const { user, system } = process.cpuUsage(); return (user + system) / 1e6; };
const tell = (count, wall_s, cpu, latencies = []) => {
  const sorted = Float64Array.from(latencies).sort();
  const at = (share) => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))];
  const more = sorted.length ? { p50_ms: at(0.5), p99_ms: at(0.99) } : {};
  console.log(JSON.stringify({ count, wall_s, cpu_s: cpu, ...more }));
};

async function commands() {
  const handle = CommandHandler({ evolve, initialState });
  const shares = Array.from({ length: +tasks }, () => []);
  const owner = new Map();
  for (const posting of postings) {
    if (!owner.has(posting[0])) owner.set(posting[0], owner.size % +tasks);
    shares[owner.get(posting[0])].push(posting);
  }
  const latencies = [];
  const one = async (share) => {
    for (const posting of share) {
      const started = performance.now();
      await handle(store, `account-${posting[0]}`, () => eventOf(posting));
      latencies.push(performance.now() - started);
    }
  };
  const started = performance.now(), cpu = cpu_s();
  await Promise.all(shares.map(one));
  tell(postings.length, (performance.now() - started) / 1e3, cpu_s() - cpu, latencies);
  const due = new Map();
  for (const posting of postings) due.set(posting[0], evolve(due.get(posting[0]) ?? initialState(), eventOf(posting)));
  for (const [account, { balance }] of [...due].slice(0, 100)) {
    const { state } = await store.aggregateStream(`account-${account}`, { evolve, initialState });
    if (state.balance !== balance) throw new Error(`${account} holds ${state.balance} and must hold ${balance}`);
  }
}

async function fill() {
  // One after the other: its rebuild loses events that were appended at the same time.
  let at = 0;
  while (at < postings.length) {
    const account = postings[at][0], events = [];
    while (at < postings.length && postings[at][0] === account) events.push(eventOf(postings[at++]));
    await store.appendToStream(`account-${account}`, events);
  }
  console.log('0.42.0');
}

async function run() {
  const client = new pg.Client(store_url);
  await client.connect();
  await client.query('drop table if exists account_balance');
  await client.query('create table account_balance (account_id varchar(40) primary key, balance numeric(14, 2) not null, postings integer not null)');
  await client.query('delete from emt_processors');
  const projection = postgreSQLRawSQLProjection({
    name: 'balances',
    canHandle: ['Deposited', 'Withdrawn'],
    evolve: ({ type, data }) => {
      const amount = type === 'Withdrawn' ? `-${data.amount}` : data.amount;
      return SQL`insert into account_balance as b values (${data.account_id}, ${amount}, 1) on conflict (account_id) do update set balance = b.balance + excluded.balance, postings = b.postings + 1`;
    },
  });
  // The fastest of its settings: large pages without a pause between them.
  const pulling = { batchSize: 1000, pullingFrequencyInMs: 0 };
  const consumer = rebuildPostgreSQLProjections({ connectionString: store_url, projections: [projection], pulling });
  const started = performance.now(), cpu = cpu_s();
  await consumer.start();
  tell(postings.length, (performance.now() - started) / 1e3, cpu_s() - cpu);
  await consumer.close();
  await client.end();
}

await { commands, fill, run }[job]();
await store.close();
process.exit(0);
