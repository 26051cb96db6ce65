-- Reads of the log by lists of ids or sequences, `:only`, a JSON array: the databases open one in different words.

-- name: settled
-- Of sequences that were reached before: up to where nothing will appear later, by the announcements of open transactions.
with announced as (
  select
    classid::bigint >> 16 as kind,
    ((classid::bigint & 65535) << 32) | objid::bigint as sequence
  from pg_locks
  where locktype = 'advisory'
    and objsubid = 1
    and database = (select oid from pg_database where datname = current_database())
)

select
  least(cast(:calls as bigint), (select min(sequence) from announced where kind = 29813)) as calls,
  least(cast(:outcomes as bigint), (select min(sequence) from announced where kind = 29814)) as outcomes,
  least(cast(:rollouts as bigint), (select min(sequence) from announced where kind = 29815)) as rollouts,
  least(cast(:trained as bigint), (select min(sequence) from announced where kind = 29816)) as trained

-- name: extents_of
-- How many calls each of these rollouts has and between which sequences they lie.
select
  rollout_id,
  count(*) as calls,
  min(sequence) as low,
  max(sequence) as high
from model_call
where rollout_id in (select json_array_elements_text(cast(:only as json)))
  and sequence <= :calls
group by rollout_id

-- name: openings_of
-- How each of these rollouts was opened.
select
  rollout_id,
  group_id,
  task,
  harness,
  opened_at
from rollout
where rollout_id in (select json_array_elements_text(cast(:only as json)))
  and sequence <= :rollouts

-- name: outcomes_of
-- Every outcome of these rollouts; the latest of each counts.
select
  sequence,
  rollout_id,
  reward,
  accepted,
  output
from rollout_outcome
where rollout_id in (select json_array_elements_text(cast(:only as json)))
  and sequence <= :outcomes

-- name: calls_of
-- The narrow columns of the completed calls of these rollouts.
select
  sequence,
  rollout_id,
  call_id,
  parent_id,
  root_id,
  depth,
  request_hash,
  chain_hash,
  digest,
  hash_version,
  prev_len,
  prompt_len,
  sampled_len,
  choice,
  media_count,
  response_id,
  policy_spans,
  hints,
  completed_at
from model_call
where rollout_id in (select json_array_elements_text(cast(:only as json)))
  and sequence <= :calls

-- name: answers_of
-- What the completed calls of these rollouts were asked and answered, as digests of items.
select
  sequence,
  rollout_id,
  answer_key,
  reasoning_digest,
  hash_version,
  answer_item_ids,
  answer_roles,
  answer_digests,
  request_roles,
  request_digests
from model_call
where rollout_id in (select json_array_elements_text(cast(:only as json)))
  and sequence <= :calls

-- name: payloads_at
-- Tokens and log-probabilities of the completed calls at these sequences, in their order.
select
  sequence,
  codec,
  token_ids,
  logprobs
from model_call
where sequence in (select cast(json_array_elements_text(cast(:only as json)) as bigint))
order by sequence
