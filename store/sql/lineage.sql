-- name: find_by_summary
-- The completed calls of a rollout that have one of these summary hashes: one probe of an index a hash. Unordered, since
-- both databases would otherwise walk the rollout's whole history in order of sequence. A fixed number of hashes, the last
-- one repeated: a list of any length would be a new statement each time.
select
  call_id, rollout_id, parent_id, root_id, depth, sequence, prompt_len, sampled_len,
  hash_version, summary_hash, chain_hash, reasoning_digest, response_id, answer_item_ids
from model_call
where rollout_id = :rollout_id
  and summary_hash in (:key_1, :key_2, :key_3, :key_4);

-- name: chain
-- Every call from a tip to its root, by parent links; the subquery makes each step one probe of the index on call_id.
-- depth counts down to the root, so that no loop of links can run for ever.
with recursive ancestor (call_id, depth) as (
  select call_id, depth
  from model_call
  where call_id = :call_id
  union all
  select (select parent_id from model_call where model_call.call_id = ancestor.call_id), ancestor.depth - 1
  from ancestor
  where ancestor.depth > 0
)
select
  model_call.call_id, model_call.parent_id, model_call.depth, model_call.prev_len, model_call.prompt_len,
  model_call.sampled_len, model_call.chain_hash, model_call.codec, model_call.token_ids
from ancestor
join model_call on model_call.call_id = ancestor.call_id
order by ancestor.depth;

-- name: recent_requests
-- The latest calls of a rollout and every call under the same roots, with the item traces each one added; recent tells
-- them apart. By root_id, not by recursion: PostgreSQL guesses a recursion's rows too high and would scan the table.
with latest (call_id, root_id) as (
  select call_id, root_id
  from model_call
  where rollout_id = :rollout_id
  order by sequence desc
  limit :calls
)
select
  call_id, parent_id, sequence, render_hash, tools_digest, request_roles, request_digests, answer_roles, answer_digests,
  call_id in (select call_id from latest) as recent
from model_call
where root_id in (select root_id from latest)
order by sequence;
