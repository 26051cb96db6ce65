-- The views of auditors, whole: chains, tokens of rows, declared rewrites beside found ones, echoes that were spelled anew.

drop view rollout_state;
drop view row_boundary;

-- One line a rollout that was opened: what became of its calls, its tokens, and its latest outcome. By subqueries for each
-- line: a join would read the whole log for one rollout.
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
  ) as last_at,
  (
    select coalesce(sum(prompt_len + sampled_len), 0) from model_call where model_call.rollout_id = rollout.rollout_id
  ) as served_tokens,
  (
    select coalesce(sum(prompt_len + sampled_len - prev_len), 0)
    from model_call
    where model_call.rollout_id = rollout.rollout_id
  ) as stored_tokens,
  (
    select coalesce(sum(sampled_len), 0) from model_call where model_call.rollout_id = rollout.rollout_id
  ) as sampled_tokens
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
  completed_at,
  json_extract(evidence, '$.items') as items,
  json_extract(evidence, '$.nearest_items') as nearest_items,
  json_extract(evidence, '$.items_shared') as items_shared,
  json_extract(evidence, '$.items_new') as items_new,
  json_extract(evidence, '$.items_gone') as items_gone,
  json_extract(hints, '$.role') as role,
  coalesce(
    (select harness from rollout where rollout.rollout_id = model_call.rollout_id), json_extract(hints, '$.harness')
  ) as harness,
  prompt_len,
  sampled_len
from model_call
where decision = 'root';

-- Every chain, one line a call, root first: from each call that nothing continues up its parent links. A walk up stops
-- where the tip's own depth says that a root must be, so that no loop of links can run for ever; in a whole log that is
-- at the root, and position equals depth.
create view chain as
select
  tip.rollout_id,
  tip.call_id as tip_call_id,
  tip.sequence as tip_sequence,
  exists (
    select 1
    from model_call as later
    where later.rollout_id = tip.rollout_id
      and later.parent_id is tip.parent_id
      and later.request_hash = tip.request_hash
      and later.choice = tip.choice
      and later.sequence > tip.sequence
  ) as superseded,
  step.key as position,
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
join json_each(
  (
    with recursive ancestor (sequence, parent_id, steps, depth) as (
      select tip.sequence, tip.parent_id, 0, tip.depth
      union all
      select above.sequence, above.parent_id, ancestor.steps + 1, ancestor.depth - 1
      from ancestor
      join model_call as above on above.call_id = ancestor.parent_id
      where ancestor.depth > 0
    )
    select json_group_array(sequence)
    from (select sequence from ancestor order by steps desc)
  )
) as step
join model_call as call on call.sequence = step.value
where not exists (select 1 from model_call as child where child.parent_id = tip.call_id);

-- Every chain as a row: how many tokens it has, how many the model sampled, how many of those train here and not in an
-- earlier row, and under which policy versions they were sampled. A superseded chain is left out by the rule `completed`.
create view row_token_count as
select
  rollout_id,
  tip_call_id,
  tip_sequence,
  root_id,
  superseded,
  count(*) as calls,
  max(case when call_id = tip_call_id then prompt_len + sampled_len end) as tokens,
  sum(sampled_len) as sampled,
  sum(case when first_tip = tip_sequence then sampled_len else 0 end) as trained,
  min(oldest) as oldest_version,
  max(newest) as newest_version,
  max(case when position = 0 then reason end) as reason,
  max(completed_at) as completed_at
from (
  select
    chain.*,
    min(case when superseded then null else tip_sequence end) over (partition by rollout_id, call_id) as first_tip,
    (select min(json_extract(value, '$.policy_version')) from json_each(policy_spans)) as oldest,
    (select max(json_extract(value, '$.policy_version')) from json_each(policy_spans)) as newest
  from chain
) as line
group by rollout_id, tip_call_id, tip_sequence, root_id, superseded;

-- What harnesses say about their own rewrites, beside the boundaries that were found. A harness says so in an outcome,
-- whose declared_rewrites name the first call of each new context, or by a window number that goes up (Codex).
-- State: both; found_only and declared_only; unreadable: a declaration that names no call; side_call: a title or summary
-- request, which is a context of its own; not_declaring: found, in a rollout whose harness declares nothing.
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
    json_extract(hints, '$.role') as role,
    json_extract(hints, '$.window') as window_number,
    row_number() over (partition by rollout_id order by sequence) as number,
    json_extract(hints, '$.window') > lag(json_extract(hints, '$.window')) over (
      partition by rollout_id, json_extract(hints, '$.thread')
      order by sequence
    ) as window_up
  from model_call
),
told as (
  select
    rollout_id,
    each.value as words,
    each.type as type,
    case each.type when 'text' then each.value when 'object' then json_extract(each.value, '$.call') end as call,
    case each.type when 'object' then json_extract(each.value, '$.at') end as at
  from rollout_outcome
  join json_each(declared_rewrites) as each
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
          or lower(hex(known.call_id)) = replace(lower(told.call), '-', '')
          or known.number = told.at
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
create view drift as
select
  model_call.sequence,
  model_call.rollout_id,
  model_call.call_id,
  model_call.parent_id,
  case
    when instr(json_extract(model_call.evidence, '$.flags'), 'reasoning_dropped') then 'reasoning_dropped'
    else 'respelled'
  end as kind,
  parent.answer_roles as served_roles,
  model_call.prev_len as kept_tokens,
  json_extract(model_call.evidence, '$.path') as path,
  json_extract(model_call.hints, '$.role') as role,
  model_call.started_at
from model_call
join model_call as parent on parent.call_id = model_call.parent_id
where substr(model_call.request_digests, 1, length(parent.answer_digests)) <> parent.answer_digests;
