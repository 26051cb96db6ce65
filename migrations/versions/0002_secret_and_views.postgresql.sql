-- The hash of a rollout's secret, and the views of auditors. It can be run again where it was cut off.
-- The check is validated by the revision itself, in a transaction of its own: adding it so holds no lock for long.

alter table rollout add column if not exists secret_hash bytea;
alter table rollout drop constraint if exists rollout_secret_hash;
alter table rollout add constraint rollout_secret_hash check (length(secret_hash) = 32) not valid;

-- One line a rollout that was opened: what became of its calls, and its latest outcome.
create or replace view rollout_state as
select
  rollout.rollout_id,
  rollout.group_id,
  rollout.slot,
  rollout.task,
  rollout.harness,
  rollout.metadata,
  rollout.opened_at,
  coalesce(completed.calls, 0) as calls,
  coalesce(completed.roots, 0) as roots,
  coalesce(ended.failed, 0) as failed,
  coalesce(ended.refused, 0) as refused,
  coalesce(ended.abandoned, 0) as abandoned,
  coalesce(ended.lost, 0) as lost,
  coalesce(admitted.pending, 0) as pending,
  scored.reward,
  scored.status,
  least(rollout.opened_at, admitted.first_at, completed.first_at, ended.first_at) as first_at,
  greatest(rollout.opened_at, admitted.last_at, completed.last_at, ended.last_at, scored.at) as last_at
from rollout
left join (
  select
    rollout_id,
    count(*) as calls,
    count(*) filter (where decision = 'root') as roots,
    min(started_at) as first_at,
    max(completed_at) as last_at
  from model_call
  group by rollout_id
) as completed on completed.rollout_id = rollout.rollout_id
left join (
  select
    rollout_id,
    count(*) filter (where state = 'failed') as failed,
    count(*) filter (where state = 'refused') as refused,
    count(*) filter (where state = 'abandoned') as abandoned,
    count(*) filter (where state = 'lost') as lost,
    min(at) as first_at,
    max(at) as last_at
  from call_end
  group by rollout_id
) as ended on ended.rollout_id = rollout.rollout_id
left join (
  select
    call_intent.rollout_id,
    count(*) filter (where answered.call_id is null and unanswered.call_id is null) as pending,
    min(call_intent.at) as first_at,
    max(call_intent.at) as last_at
  from call_intent
  left join model_call as answered on answered.call_id = call_intent.call_id
  left join call_end as unanswered on unanswered.call_id = call_intent.call_id
  group by call_intent.rollout_id
) as admitted on admitted.rollout_id = rollout.rollout_id
left join (
  select distinct on (rollout_id) rollout_id, reward, status, at
  from rollout_outcome
  order by rollout_id, sequence desc
) as scored on scored.rollout_id = rollout.rollout_id;

-- Every root: why a row begins there, and where its request parts from the nearest earlier call's.
create or replace view row_boundary as
select
  model_call.sequence,
  model_call.rollout_id,
  model_call.call_id,
  model_call.reason,
  told.nearest_call,
  told.first_difference,
  told.role_here,
  told.role_there,
  told.digest_here,
  told.digest_there,
  model_call.started_at,
  model_call.completed_at
from model_call
cross join lateral json_to_record(model_call.evidence::json) as told (
  nearest_call text,
  first_difference bigint,
  role_here text,
  role_there text,
  digest_here text,
  digest_there text
)
where model_call.decision = 'root';
