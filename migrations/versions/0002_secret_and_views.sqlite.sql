-- The hash of a rollout's secret, and the views of auditors.

alter table rollout add column secret_hash blob constraint rollout_secret_hash check (length(secret_hash) = 32);

-- One line a rollout that was opened: what became of its calls, and its latest outcome. By subqueries for each line: a join
-- would read the whole log for one rollout.
create view rollout_state as
select
  rollout_id,
  group_id,
  slot,
  task,
  harness,
  metadata,
  opened_at,
  (select count(*) from model_call where model_call.rollout_id = rollout.rollout_id) as calls,
  (
    select count(*) from model_call where model_call.rollout_id = rollout.rollout_id and decision = 'root'
  ) as roots,
  (select count(*) from call_end where call_end.rollout_id = rollout.rollout_id and state = 'failed') as failed,
  (select count(*) from call_end where call_end.rollout_id = rollout.rollout_id and state = 'refused') as refused,
  (select count(*) from call_end where call_end.rollout_id = rollout.rollout_id and state = 'abandoned') as abandoned,
  (select count(*) from call_end where call_end.rollout_id = rollout.rollout_id and state = 'lost') as lost,
  (
    select count(*)
    from call_intent
    where call_intent.rollout_id = rollout.rollout_id
      and not exists (select 1 from model_call where model_call.call_id = call_intent.call_id)
      and not exists (select 1 from call_end where call_end.call_id = call_intent.call_id)
  ) as pending,
  (
    select reward from rollout_outcome where rollout_outcome.rollout_id = rollout.rollout_id order by sequence desc limit 1
  ) as reward,
  (
    select status from rollout_outcome where rollout_outcome.rollout_id = rollout.rollout_id order by sequence desc limit 1
  ) as status,
  min(
    opened_at,
    coalesce((select min(at) from call_intent where call_intent.rollout_id = rollout.rollout_id), opened_at),
    coalesce((select min(started_at) from model_call where model_call.rollout_id = rollout.rollout_id), opened_at),
    coalesce((select min(at) from call_end where call_end.rollout_id = rollout.rollout_id), opened_at)
  ) as first_at,
  max(
    opened_at,
    coalesce((select max(at) from call_intent where call_intent.rollout_id = rollout.rollout_id), opened_at),
    coalesce((select max(completed_at) from model_call where model_call.rollout_id = rollout.rollout_id), opened_at),
    coalesce((select max(at) from call_end where call_end.rollout_id = rollout.rollout_id), opened_at),
    coalesce(
      (
        select at from rollout_outcome where rollout_outcome.rollout_id = rollout.rollout_id order by sequence desc limit 1
      ),
      opened_at
    )
  ) as last_at
from rollout;

-- Every root: why a row begins there, and where its request parts from the nearest earlier call's.
create view row_boundary as
select
  sequence,
  rollout_id,
  call_id,
  reason,
  json_extract(evidence, '$.nearest_call') as nearest_call,
  json_extract(evidence, '$.first_difference') as first_difference,
  json_extract(evidence, '$.role_here') as role_here,
  json_extract(evidence, '$.role_there') as role_there,
  json_extract(evidence, '$.digest_here') as digest_here,
  json_extract(evidence, '$.digest_there') as digest_there,
  started_at,
  completed_at
from model_call
where decision = 'root';
