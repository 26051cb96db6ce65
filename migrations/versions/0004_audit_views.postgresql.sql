-- The views of auditors, whole: chains, tokens of rows, declared rewrites beside found ones, echoes that were spelled anew.
-- New columns of views that are there already come last, which is all that PostgreSQL lets them do.

-- One line a rollout that was opened: what became of its calls, its tokens, and its latest outcome.
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
  greatest(rollout.opened_at, admitted.last_at, completed.last_at, ended.last_at, scored.at) as last_at,
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
  model_call.completed_at,
  told.items,
  told.nearest_items,
  told.items_shared,
  told.items_new,
  told.items_gone,
  hints::json ->> 'role' as role,
  coalesce(
    (select harness from rollout where rollout.rollout_id = model_call.rollout_id), hints::json ->> 'harness'
  ) as harness,
  model_call.prompt_len,
  model_call.sampled_len
from model_call
cross join lateral json_to_record(model_call.evidence::json) as told (
  nearest_call text,
  first_difference bigint,
  role_here text,
  role_there text,
  digest_here text,
  digest_there text,
  items bigint,
  nearest_items bigint,
  items_shared bigint,
  items_new bigint,
  items_gone bigint
)
where model_call.decision = 'root';

-- Every chain, one line a call, root first: from each call that nothing continues up its parent links. A walk up stops
-- where the tip's own depth says that a root must be, so that no loop of links can run for ever; in a whole log that is
-- at the root, and position equals depth. The subqueries make each step one probe of one partition.
create or replace view chain as
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
  step.position,
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
from model_call as tip
cross join lateral (
  with recursive ancestor (call_id, steps, depth) as (
    select tip.call_id, cast(0 as bigint), tip.depth
    union all
    select
      (select parent_id from model_call where model_call.call_id = ancestor.call_id),
      ancestor.steps + 1,
      ancestor.depth - 1
    from ancestor
    where ancestor.depth > 0
  )
  select call_id, max(steps) over () - steps as position
  from ancestor
  where call_id is not null
) as step
cross join lateral (select * from model_call where model_call.call_id = step.call_id limit 1) as call
where not exists (select 1 from model_call as child where child.parent_id = tip.call_id);

-- Every chain as a row: how many tokens it has, how many the model sampled, how many of those train here and not in an
-- earlier row, and under which policy versions they were sampled. A superseded chain is left out by the rule `completed`.
create or replace view row_token_count as
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
  min(oldest) as oldest_version,
  max(newest) as newest_version,
  max(case when position = 0 then reason end) as reason,
  max(completed_at) as completed_at
from (
  select
    chain.*,
    min(case when superseded = 1 then null else tip_sequence end) over (
      partition by rollout_id, call_id
    ) as first_tip,
    sampled_under.oldest,
    sampled_under.newest
  from chain
  cross join lateral (
    select min(policy_version) as oldest, max(policy_version) as newest
    from json_to_recordset(policy_spans::json) as span (policy_version bigint)
  ) as sampled_under
) as line
group by rollout_id, tip_call_id, tip_sequence, root_id, superseded;

-- What harnesses say about their own rewrites, beside the boundaries that were found. A harness says so in an outcome,
-- whose declared_rewrites name the first call of each new context, or by a window number that goes up (Codex).
-- State: both; found_only and declared_only; unreadable: a declaration that names no call; side_call: a title or summary
-- request, which is a context of its own; not_declaring: found, in a rollout whose harness declares nothing.
create or replace view declared_vs_found as
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
    hints::json ->> 'role' as role,
    cast(hints::json ->> 'window' as bigint) as window_number,
    row_number() over (partition by rollout_id order by sequence) as number,
    cast(hints::json ->> 'window' as bigint) > lag(cast(hints::json ->> 'window' as bigint)) over (
      partition by rollout_id, hints::json ->> 'thread'
      order by sequence
    ) as window_up
  from model_call
),
told as (
  select
    rollout_id,
    cast(each.value as text) as words,
    case json_typeof(each.value) when 'string' then each.value #>> '{}' when 'object' then each.value ->> 'call' end as call,
    case when json_typeof(each.value) = 'object' then each.value ->> 'at' end as at
  from rollout_outcome
  cross join lateral json_array_elements(declared_rewrites::json) as each (value)
  where not exists (
    select 1
    from rollout_outcome as later
    where later.rollout_id = rollout_outcome.rollout_id and later.sequence > rollout_outcome.sequence
  )
),
said as (
  select
    told.rollout_id,
    told.words,
    (
      select known.call_id
      from known
      where known.rollout_id = told.rollout_id
        and (
          known.response_id = told.call
          or cast(known.call_id as text) = lower(told.call)
          or cast(known.number as text) = told.at
        )
      limit 1
    ) as call_id
  from told
)
select
  known.rollout_id,
  known.call_id,
  known.sequence,
  known.reason,
  known.role,
  case when known.call_id in (select call_id from said) then 'outcome' when known.window_up then 'window' end as source,
  (select words from said where said.call_id = known.call_id limit 1) as declared,
  case
    when known.window_up or known.call_id in (select call_id from said)
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
  or known.call_id in (select call_id from said)
union all
select rollout_id, null, null, null, null, 'outcome', words, 'unreadable'
from said
where call_id is null;

-- Continuations whose harness gave the answer back otherwise than it was served: without its thoughts, or in other words
-- of the same meaning. The model goes on seeing the tokens that it sampled; rendered afresh, the prompt would be another.
create or replace view drift as
select
  model_call.sequence,
  model_call.rollout_id,
  model_call.call_id,
  model_call.parent_id,
  case
    when model_call.evidence::json ->> 'flags' like '%reasoning_dropped%' then 'reasoning_dropped'
    else 'respelled'
  end as kind,
  parent.answer_roles as served_roles,
  model_call.prev_len as kept_tokens,
  model_call.evidence::json ->> 'path' as path,
  model_call.hints::json ->> 'role' as role,
  model_call.started_at
from model_call
join model_call as parent on parent.call_id = model_call.parent_id
where substring(model_call.request_digests from 1 for length(parent.answer_digests)) <> parent.answer_digests;
