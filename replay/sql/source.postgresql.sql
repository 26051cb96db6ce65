-- Reads of the log by lists of ids or sequences, `:only`, a JSON array: the databases open one in different words.

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
