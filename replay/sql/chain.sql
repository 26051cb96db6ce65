-- name: chain
-- Walks from each selected call that no selected call continues up to its root by parent links, and says for each
-- (tip, call) the call's position on that path, 0 for the topmost.
-- Reads model_call(call, rollout, call_id, parent_id) and selected(call). Links are resolved to numbers once and kept:
-- a recursive step that joins the Arrow table itself would scan it again at every depth.
with recursive

link as materialized (
  select
    child.call,
    parent.call as parent
  from model_call as child
  join model_call as parent
    on parent.call_id = child.parent_id
    and parent.rollout = child.rollout
),

endpoint as (
  select call
  from selected
  where call not in (
    select link.parent
    from selected
    join link using (call)
  )
),

walk as (
  select
    call as tip,
    call,
    0 as steps
  from endpoint
  union all
  select
    walk.tip,
    link.parent,
    walk.steps + 1
  from walk
  join link using (call)
  where walk.steps < :max_depth
)

select
  tip,
  max(steps) over (partition by tip) - steps as position,
  call
from walk
