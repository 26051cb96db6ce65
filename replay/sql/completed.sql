-- name: superseded
-- Calls that a later sibling of the same request and choice supersedes, and that no completed call continues.
-- Reads model_call(call, rollout, number, call_id, parent_id, request_hash, choice).
with sibling as (
  select
    call,
    rollout,
    call_id,
    lead(call) over (
      partition by rollout, parent_id, request_hash, choice
      order by number
    ) as later
  from model_call
)

select call
from sibling
where later is not null
  and not exists (
    select 1
    from model_call as child
    where child.parent_id = sibling.call_id
      and child.rollout = sibling.rollout
  )
order by call
