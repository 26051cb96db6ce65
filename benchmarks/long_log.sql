-- A log of many narrow calls, made by the database itself (long_log.py).

-- name: fill_postgresql
-- Calls low to high, past the triggers.
insert into model_call (
  call_id, rollout_id, parent_id, root_id, depth, decision, reason, candidates, reasoning_policy, summary_hash,
  request_hash, answer_key, render_hash, tools_digest, hash_version, prev_len, prompt_len, sampled_len, chain_hash,
  policy_spans, finish_reason, dialect, model, response_id, answer_item_ids, choice, media_count, writer_id, writer_seq,
  started_at, completed_at, digest, evidence, sampling, hints, request_roles, request_digests, answer_roles,
  answer_digests, codec, token_ids, logprobs
)
select
  made.id, 'r' || lpad(((n - 1) / (%(live)s * %(turns)s) * %(live)s + (n - 1) %% %(live)s)::text, 8, '0'),
  case when turn > 0 then above.id end, case when turn > 0 then root.id else made.id end, turn,
  case when turn > 0 then 'continuation' else 'root' end, 'answer_found', 1, 'strict', sha256(int8send(n)),
  blank, blank, blank, blank, 1, 2 * turn, 2 * turn + 1, 1, sha256(int8send(-n)),
  '[{"end":1,"policy_version":1,"start":0}]', 'stop', 'chat', 'benchmark', 'chatcmpl-' || n, '[]', 0, 0,
  '00000000-0000-7000-8000-000000000000', n, at, at + 1, sha256(int8send(n)), '{}', '{}', '{}', '[]', '', '[]',
  '', 0, '\x0102030405060708', '\x00000000'
from generate_series(%(low)s::bigint, %(high)s) as n
cross join lateral (select
  (n - 1) / %(live)s %% %(turns)s as turn,
  ('\x' || repeat('00', 32))::bytea as blank,
  (%(first)s + floor(n * %(step)s::float8))::bigint * 1000 as at
) as place
cross join lateral (select
  (lpad(to_hex(at / 1000), 12, '0') || '70008000' || lpad(to_hex(n), 12, '0'))::uuid as id
) as made
cross join lateral (select
  (lpad(to_hex((%(first)s + floor((n - %(live)s) * %(step)s::float8))::bigint), 12, '0') || '70008000'
    || lpad(to_hex(greatest(n - %(live)s, 0)), 12, '0'))::uuid as id
) as above
cross join lateral (select
  (lpad(to_hex((%(first)s + floor((n - turn * %(live)s) * %(step)s::float8))::bigint), 12, '0') || '70008000'
    || lpad(to_hex(greatest(n - turn * %(live)s, 0)), 12, '0'))::uuid as id
) as root;

-- name: open_postgresql
-- Their rollouts.
insert into rollout (rollout_id, metadata, opened_at, digest)
select
  'r' || lpad(r::text, 8, '0'), '{}',
  (%(first)s + floor((r / %(live)s * %(live)s * %(turns)s + r %% %(live)s + 1) * %(step)s::float8))::bigint * 1000,
  sha256(int8send(r))
from generate_series(0, %(rollouts)s::bigint - 1) as r;

-- name: fill_sqlite
-- All calls at once.
insert into model_call (
  call_id, rollout_id, parent_id, root_id, depth, decision, reason, candidates, reasoning_policy, summary_hash,
  request_hash, answer_key, render_hash, tools_digest, hash_version, prev_len, prompt_len, sampled_len, chain_hash,
  policy_spans, finish_reason, dialect, model, response_id, answer_item_ids, choice, media_count, writer_id, writer_seq,
  started_at, completed_at, digest, evidence, sampling, hints, request_roles, request_digests, answer_roles,
  answer_digests, codec, token_ids, logprobs
)
with recursive counted (n) as (select 1 union all select n + 1 from counted where n < :calls),
placed as (select n, (n - 1) / :live % :turns as turn, cast((:first + n * :step) * 1000 as integer) as at from counted)
select
  call_id(n), printf('r%08d', (n - 1) / (:live * :turns) * :live + (n - 1) % :live),
  iif(turn > 0, call_id(n - :live), null), call_id(n - turn * :live), turn,
  iif(turn > 0, 'continuation', 'root'), 'answer_found', 1, 'strict', key(n),
  zeroblob(32), zeroblob(32), zeroblob(32), zeroblob(32), 1, 2 * turn, 2 * turn + 1, 1, randomblob(32),
  '[{"end":1,"policy_version":1,"start":0}]', 'stop', 'chat', 'benchmark', 'chatcmpl-' || n, '[]', 0, 0,
  zeroblob(16), n, at, at + 1, randomblob(32), '{}', '{}', '{}', '[]', x'', '[]', x'', 0, zeroblob(8), zeroblob(4)
from placed;

-- name: open_sqlite
-- Their rollouts.
insert into rollout (rollout_id, metadata, opened_at, digest)
with recursive counted (r) as (select 0 union all select r + 1 from counted where r < :rollouts - 1)
select
  printf('r%08d', r), '{}',
  cast((:first + (r / :live * :live * :turns + r % :live + 1) * :step) * 1000 as integer), randomblob(32)
from counted;
