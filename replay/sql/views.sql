-- The views of auditors in DuckDB, over the tables of log and archive together; columns and meaning are those of revisions
-- 0004 and 0006, which have them for SQLite and PostgreSQL. Arrays are not among the tables.

-- name: view_rollout_state
-- One line a rollout that was opened.
create view rollout_state as
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
  greatest(rollout.opened_at, admitted.last_at, completed.last_at, ended.last_at, scored."at") as last_at,
  coalesce(completed.served_tokens, 0) as served_tokens,
  coalesce(completed.stored_tokens, 0) as stored_tokens,
  coalesce(completed.sampled_tokens, 0) as sampled_tokens
from rollout
left join (
  select
    rollout_id,
    count(*) as calls,
    count(*) filter (where decision = 'root') as roots,
    min(started_at) as first_at,
    max(completed_at) as last_at,
    cast(sum(prompt_len + sampled_len) as bigint) as served_tokens,
    cast(sum(prompt_len + sampled_len - prev_len) as bigint) as stored_tokens,
    cast(sum(sampled_len) as bigint) as sampled_tokens
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
    min("at") as first_at,
    max("at") as last_at
  from call_end
  group by rollout_id
) as ended on ended.rollout_id = rollout.rollout_id
left join (
  select
    call_intent.rollout_id,
    count(*) filter (where answered.call_id is null and unanswered.call_id is null) as pending,
    min(call_intent."at") as first_at,
    max(call_intent."at") as last_at
  from call_intent
  left join model_call as answered on answered.call_id = call_intent.call_id
  left join call_end as unanswered on unanswered.call_id = call_intent.call_id
  group by call_intent.rollout_id
) as admitted on admitted.rollout_id = rollout.rollout_id
left join (
  select rollout_id, arg_max(reward, sequence) as reward, arg_max(status, sequence) as status, arg_max("at", sequence) as "at"
  from rollout_outcome
  group by rollout_id
) as scored on scored.rollout_id = rollout.rollout_id

-- name: view_row_boundary
-- Every root, and where its request parts from the nearest earlier call's.
create view row_boundary as
select
  model_call.sequence,
  model_call.rollout_id,
  model_call.call_id,
  model_call.reason,
  evidence ->> '$.nearest_call' as nearest_call,
  cast(evidence ->> '$.first_difference' as bigint) as first_difference,
  evidence ->> '$.role_here' as role_here,
  evidence ->> '$.role_there' as role_there,
  evidence ->> '$.digest_here' as digest_here,
  evidence ->> '$.digest_there' as digest_there,
  model_call.started_at,
  model_call.completed_at,
  cast(evidence ->> '$.items' as bigint) as items,
  cast(evidence ->> '$.nearest_items' as bigint) as nearest_items,
  cast(evidence ->> '$.items_shared' as bigint) as items_shared,
  cast(evidence ->> '$.items_new' as bigint) as items_new,
  cast(evidence ->> '$.items_gone' as bigint) as items_gone,
  hints ->> '$.role' as role,
  coalesce(rollout.harness, hints ->> '$.harness') as harness,
  model_call.prompt_len,
  model_call.sampled_len
from model_call
left join rollout on rollout.rollout_id = model_call.rollout_id
where model_call.decision = 'root'

-- name: view_chain
-- Every chain, one line a call, root first. A walk up stops where the tip's own depth says that a root must be.
create view chain as
with recursive
tip as (
  select *
  from model_call
  where not exists (select 1 from model_call as child where child.parent_id = model_call.call_id)
),
ancestor (tip, call_id, parent_id, steps, depth) as (
  select sequence, call_id, parent_id, 0, depth
  from tip
  union all
  select ancestor.tip, above.call_id, above.parent_id, ancestor.steps + 1, ancestor.depth - 1
  from ancestor
  join model_call as above on above.call_id = ancestor.parent_id
  where ancestor.depth > 0
)
select
  tip.rollout_id,
  tip.call_id as tip_call_id,
  tip.sequence as tip_sequence,
  cast(
    exists (
      select 1
      from model_call as later
      where later.rollout_id = tip.rollout_id
        and later.parent_id is not distinct from tip.parent_id
        and later.request_hash = tip.request_hash
        and later.choice = tip.choice
        and later.sequence > tip.sequence
    ) as integer
  ) as superseded,
  max(steps) over (partition by ancestor.tip) - steps as position,
  call.call_id,
  call.sequence,
  call.parent_id,
  call.root_id,
  call.depth,
  call.decision,
  call.reason,
  call.prev_len,
  call.prompt_len,
  call.sampled_len,
  call.policy_spans,
  call.finish_reason,
  call.model,
  call.started_at,
  call.completed_at
from ancestor
join tip on tip.sequence = ancestor.tip
join model_call as call on call.call_id = ancestor.call_id

-- name: view_row_token_count
-- Every chain as a row.
create view row_token_count as
select
  rollout_id,
  tip_call_id,
  tip_sequence,
  root_id,
  superseded,
  count(*) as calls,
  max(case when call_id = tip_call_id then prompt_len + sampled_len end) as tokens,
  cast(sum(sampled_len) as bigint) as sampled,
  cast(sum(case when first_tip = tip_sequence then sampled_len else 0 end) as bigint) as trained,
  min(list_min(versions)) as oldest_version,
  max(list_max(versions)) as newest_version,
  max(case when position = 0 then reason end) as reason,
  max(completed_at) as completed_at
from (
  select
    chain.*,
    min(case when superseded = 1 then null else tip_sequence end) over (
      partition by rollout_id, call_id
    ) as first_tip,
    cast(json_extract(policy_spans, '$[*].policy_version') as bigint[]) as versions
  from chain
) as line
group by rollout_id, tip_call_id, tip_sequence, root_id, superseded

-- name: view_declared_vs_found
-- What harnesses declare, beside what was found.
create view declared_vs_found as
with
known as (
  select
    rollout_id,
    call_id,
    sequence,
    reason,
    response_id,
    decision,
    decision = 'root' and reason not in ('first_call', 'fresh_context') as rewritten,
    hints ->> '$.role' as role,
    cast(hints ->> '$.window' as bigint) as window_number,
    row_number() over (partition by rollout_id order by sequence) as number,
    cast(hints ->> '$.window' as bigint) > lag(cast(hints ->> '$.window' as bigint)) over (
      partition by rollout_id, hints ->> '$.thread'
      order by sequence
    ) as window_up
  from model_call
),
told as (
  select
    rollout_id,
    words,
    case json_type(words) when 'VARCHAR' then words ->> '$' when 'OBJECT' then words ->> '$.call' end as call,
    case when json_type(words) = 'OBJECT' then words ->> '$.at' end as "at"
  from (
    select rollout_id, unnest(cast(declared_rewrites as json[])) as words
    from rollout_outcome
    where not exists (
      select 1
      from rollout_outcome as later
      where later.rollout_id = rollout_outcome.rollout_id and later.sequence > rollout_outcome.sequence
    )
  ) as latest
),
said as (
  select
    told.rollout_id,
    told.words,
    (
      select min(known.call_id)
      from known
      where known.rollout_id = told.rollout_id
        and (
          known.response_id = told.call
          or cast(known.call_id as text) = lower(told.call)
          or cast(known.number as text) = told."at"
        )
    ) as call_id
  from told
)
select
  known.rollout_id,
  known.call_id,
  known.sequence,
  known.reason,
  known.role,
  case when exists (select 1 from said where said.call_id = known.call_id) then 'outcome' when known.window_up then 'window' end as source,
  cast((select min(words) from said where said.call_id = known.call_id) as text) as declared,
  case
    when known.window_up or exists (select 1 from said where said.call_id = known.call_id)
      then case known.decision when 'root' then 'both' else 'declared_only' end
    when known.role in ('title', 'summary') then 'side_call'
    when exists (select 1 from said where said.rollout_id = known.rollout_id)
      or exists (select 1 from known as other where other.rollout_id = known.rollout_id and other.window_number is not null)
      then 'found_only'
    else 'not_declaring'
  end as state
from known
where known.rewritten
  or known.window_up
  or exists (select 1 from said where said.call_id = known.call_id)
union all
select rollout_id, null, null, null, null, 'outcome', cast(words as text), 'unreadable'
from said
where call_id is null

-- name: view_drift
-- Continuations whose harness gave the answer back otherwise than it was served.
create view drift as
select
  model_call.sequence,
  model_call.rollout_id,
  model_call.call_id,
  model_call.parent_id,
  case
    when model_call.evidence ->> '$.flags' like '%reasoning_dropped%' then 'reasoning_dropped'
    else 'respelled'
  end as kind,
  parent.answer_roles as served_roles,
  model_call.prev_len as kept_tokens,
  model_call.evidence ->> '$.path' as path,
  model_call.hints ->> '$.role' as role,
  model_call.started_at
from model_call
join model_call as parent on parent.call_id = model_call.parent_id
where not starts_with(hex(model_call.request_digests), hex(parent.answer_digests))
