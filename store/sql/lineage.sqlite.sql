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

-- name: chain_media
-- Every media occurrence in the prompt of a call: those of its own and of each call up to its root.
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
  call_media.call_id, call_media.place, call_media.rollout_id, call_media.modality, call_media.sha256,
  call_media.item_hash, call_media.mm_hash, call_media.start, call_media.length, call_media.tokens,
  call_media.geometry, call_media.at
from ancestor
join call_media on call_media.call_id = ancestor.call_id
order by call_media.start;
