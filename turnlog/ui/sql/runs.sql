-- name: runs
-- Every run by its name, from one to the next in the index; and where it stands.
with recursive known (run) as (
  select min(run) from trained_row
  union all
  select (select min(run) from trained_row where trained_row.run > known.run)
  from known
  where known.run is not null
)
select
  run,
  (select min(step) from trained_row where trained_row.run = known.run) as first_step,
  (select max(step) from trained_row where trained_row.run = known.run) as last_step
from known
where run is not null
order by run
limit :most

-- name: steps
-- The latest steps of a run below one, with how many rows each has: from the index alone.
select
  step,
  count(*) as rows
from trained_row
where run = :run
  and step < :below
group by step
order by step desc
limit :most

-- name: depths
-- How many calls the rows of some steps of a run have, by step: each row as many as its tip is deep.
select
  trained_row.step,
  sum((select depth + 1 from model_call where model_call.call_id = trained_row.tip_call_id)) as calls
from trained_row
where trained_row.run = :run
  and trained_row.step between :low and :high
group by trained_row.step
order by trained_row.step desc

-- name: rows
-- The rows of some steps of a run, each with the length of its tip's chain.
select
  trained_row.step,
  trained_row.row_id,
  trained_row.rollout_id,
  trained_row.tip_call_id,
  trained_row.selection,
  trained_row.selection_version,
  trained_row.advantage,
  trained_row.trainer_policy_version,
  trained_row.at,
  (
    select prompt_len + sampled_len from model_call where model_call.call_id = trained_row.tip_call_id
  ) as tokens
from trained_row
where trained_row.run = :run
  and trained_row.step between :low and :high
order by trained_row.step, trained_row.row_id

-- name: row_calls
-- The calls of these rows, from each tip up the parent links: one probe of an index a step up.
with recursive ancestor (step, row_id, call_id) as (
  select
    step,
    row_id,
    tip_call_id
  from trained_row
  where run = :run
    and step between :low and :high
  union all
  select
    step,
    row_id,
    (select parent_id from model_call where model_call.call_id = ancestor.call_id)
  from ancestor
  where call_id is not null
)
select
  ancestor.step,
  ancestor.row_id,
  ancestor.call_id,
  model_call.sampled_len,
  model_call.policy_spans
from ancestor
join model_call on model_call.call_id = ancestor.call_id
