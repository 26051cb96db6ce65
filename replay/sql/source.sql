-- Reads of the log. `:calls`, `:outcomes`, `:rollouts` and `:trained` are the parts of a position: an event with a higher
-- sequence does not count. `:only` is a JSON array of ids or sequences, opened in SQLite's words.

-- name: extents
-- How many calls each rollout has and the highest sequence of these; answered from an index alone.
select
  rollout_id,
  count(*) as calls,
  max(sequence) as high
from model_call
where sequence <= :calls
group by rollout_id

-- name: openings
-- How each rollout was opened.
select
  rollout_id,
  group_id,
  task,
  harness,
  opened_at
from rollout
where sequence <= :rollouts

-- name: outcomes
-- Every outcome; the latest of a rollout counts.
select
  sequence,
  rollout_id,
  reward,
  accepted,
  output
from rollout_outcome
where sequence <= :outcomes

-- name: newest_lengths
-- How many tokens each of the newest calls adds to its parent's chain.
select prompt_len - prev_len + sampled_len as tokens
from model_call
order by sequence desc
limit 200

-- name: payloads_between
-- Tokens and log-probabilities of completed calls, all that lie between two sequences, in their order.
select
  sequence,
  codec,
  token_ids,
  logprobs
from model_call
where sequence between :low and :high
order by sequence

-- name: extents_of
-- How many calls each of these rollouts has and the highest sequence of these.
select
  rollout_id,
  count(*) as calls,
  max(sequence) as high
from model_call
where rollout_id in (select value from json_each(:only))
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
where rollout_id in (select value from json_each(:only))
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
where rollout_id in (select value from json_each(:only))
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
where rollout_id in (select value from json_each(:only))
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
where rollout_id in (select value from json_each(:only))
  and sequence <= :calls

-- name: payloads_at
-- Tokens and log-probabilities of the completed calls at these sequences, in their order.
select
  sequence,
  codec,
  token_ids,
  logprobs
from model_call
where sequence in (select cast(value as bigint) from json_each(:only))
order by sequence

-- name: media_of
-- What the calls of these rollouts show beside tokens.
select
  sequence,
  rollout_id,
  call_id,
  place,
  modality,
  sha256,
  start,
  length,
  tokens,
  geometry
from call_media
where rollout_id in (select value from json_each(:only))
