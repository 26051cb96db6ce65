-- name: trained
-- Every row that entered a training step, in the order of the log, up to a sequence.
select
  run,
  step,
  row_id,
  rollout_id
from trained_row
where sequence <= :trained
order by sequence

-- name: row_calls
-- The calls that made one row of one step, root first: from the row's tip up the parent links. A row begins at a root,
-- so tip and links say all of it. The subquery makes each step up one probe of an index, and depth ends it in any case.
with recursive ancestor (call_id, depth) as (
  select
    model_call.call_id,
    model_call.depth
  from trained_row
  join model_call on model_call.call_id = trained_row.tip_call_id
  where trained_row.run = :run
    and trained_row.step = :step
    and trained_row.row_id = :row_id
  union all
  select
    (select parent_id from model_call where model_call.call_id = ancestor.call_id),
    ancestor.depth - 1
  from ancestor
  where ancestor.depth > 0
)
select
  model_call.call_id,
  model_call.sequence,
  model_call.decision,
  model_call.reason,
  model_call.prev_len,
  model_call.prompt_len,
  model_call.sampled_len,
  model_call.policy_spans,
  model_call.model,
  model_call.completed_at
from ancestor
join model_call on model_call.call_id = ancestor.call_id
order by ancestor.depth

-- name: rollout_steps
-- Every step that a row of the rollout went into, in the order of the log.
select
  run,
  step,
  row_id,
  rollout_id,
  tip_call_id,
  selection,
  selection_version,
  advantage,
  trainer_policy_version,
  at
from trained_row
where rollout_id = :rollout_id
order by sequence
