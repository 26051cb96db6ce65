-- name: opened_at
-- When a rollout was opened, before which it had no calls.
select opened_at
from rollout
where rollout_id = :rollout_id;

-- name: find_by_summary
-- The completed calls of a rollout that have this summary hash: one probe of an index, in the one or two partitions where
-- the rollout's ids lie, from `low` to below `high`. Unordered, since both databases would otherwise walk the rollout's
-- whole history in order of sequence. One hash, as most requests have: for a list of them PostgreSQL would rather read a
-- whole partition's ids, as long as it has not yet been analysed.
select
  call_id, rollout_id, parent_id, root_id, depth, sequence, prompt_len, sampled_len,
  hash_version, summary_hash, chain_hash, reasoning_digest, response_id, answer_item_ids
from model_call
where rollout_id = :rollout_id
  and summary_hash = :key
  and call_id >= :low
  and call_id < :high;

-- name: recent_requests
-- The latest calls of a rollout and every call under the same roots, with the item traces each one added; recent tells
-- them apart. By root_id, not by recursion: PostgreSQL guesses a recursion's rows too high and would scan the table.
with latest (call_id, root_id) as (
  select call_id, root_id
  from model_call
  where rollout_id = :rollout_id
    and call_id >= :low
    and call_id < :high
  order by sequence desc
  limit :calls
)
select
  call_id, parent_id, sequence, render_hash, tools_digest, request_roles, request_digests, answer_roles, answer_digests,
  call_id in (select call_id from latest) as recent
from model_call
where root_id in (select root_id from latest)
  and call_id >= :low
  and call_id < :high
order by sequence;
