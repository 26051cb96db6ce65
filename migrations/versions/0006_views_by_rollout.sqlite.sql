-- The views that went through the whole log when they were asked of one rollout: each line of rollout is answered by itself,
-- as JSON, since SQLite has no lateral join.

drop view declared_vs_found;
drop view row_token_count;

-- Every chain as a row: how many tokens it has, how many the model sampled, how many of those train here and not in an
-- earlier row, and under which policy versions they were sampled. A superseded chain is left out by the rule `completed`.
create view row_token_count as
select
  rollout.rollout_id,
  tip.call_id as tip_call_id,
  tip.sequence as tip_sequence,
  tip.root_id,
  json_extract(line.value, '$.superseded') as superseded,
  json_extract(line.value, '$.calls') as calls,
  tip.prompt_len + tip.sampled_len as tokens,
  json_extract(line.value, '$.sampled') as sampled,
  json_extract(line.value, '$.trained') as trained,
  json_extract(line.value, '$.oldest') as oldest_version,
  json_extract(line.value, '$.newest') as newest_version,
  json_extract(line.value, '$.reason') as reason,
  json_extract(line.value, '$.completed_at') as completed_at
from rollout
join json_each(
  (
    select
      json_group_array(
        json_object(
          'tip', tip_sequence, 'superseded', superseded, 'calls', calls, 'sampled', sampled, 'trained', trained,
          'oldest', oldest, 'newest', newest, 'reason', reason, 'completed_at', completed_at
        )
      )
    from (
      select
        tip_sequence,
        superseded,
        count(*) as calls,
        sum(sampled_len) as sampled,
        sum(case when first_tip = tip_sequence then sampled_len else 0 end) as trained,
        min(oldest) as oldest,
        max(newest) as newest,
        max(case when position = 0 then reason end) as reason,
        max(completed_at) as completed_at
      from (
        select
          chain.*,
          min(case when superseded then null else tip_sequence end) over (partition by call_id) as first_tip,
          (select min(json_extract(value, '$.policy_version')) from json_each(policy_spans)) as oldest,
          (select max(json_extract(value, '$.policy_version')) from json_each(policy_spans)) as newest
        from chain
        where chain.rollout_id = rollout.rollout_id
      )
      group by tip_sequence, superseded
    )
  )
) as line
join model_call as tip on tip.sequence = json_extract(line.value, '$.tip');

-- What harnesses say about their own rewrites, beside the boundaries that were found, a rollout at a time. A harness says so
-- in an outcome, whose declared_rewrites name the first call of each new context, or by a window number that goes up (Codex).
-- State: both; found_only and declared_only; unreadable: a declaration that names no call; side_call: a title or summary
-- request, which is a context of its own; not_declaring: found, in a rollout whose harness declares nothing.
create view declared_vs_found as
select
  rollout.rollout_id,
  call.call_id,
  call.sequence,
  call.reason,
  json_extract(call.hints, '$.role') as role,
  json_extract(line.value, '$.source') as source,
  json_extract(line.value, '$.declared') as declared,
  json_extract(line.value, '$.state') as state
from rollout
join json_each(
  (
    with
    known as materialized (
      select
        call_id,
        sequence,
        response_id,
        decision,
        decision = 'root' and reason not in ('first_call', 'fresh_context') as rewritten,
        json_extract(hints, '$.role') as role,
        row_number() over (order by sequence) as number,
        json_extract(hints, '$.window') > lag(json_extract(hints, '$.window')) over (
          partition by json_extract(hints, '$.thread')
          order by sequence
        ) as window_up,
        max(json_extract(hints, '$.window') is not null) over () as counts_windows
      from model_call
      where model_call.rollout_id = rollout.rollout_id
    ),
    told as (
      select
        value as words,
        case type when 'text' then value when 'object' then json_extract(value, '$.call') end as call,
        case type when 'object' then json_extract(value, '$.at') end as at
      from json_each(
        (
          select declared_rewrites
          from rollout_outcome
          where rollout_outcome.rollout_id = rollout.rollout_id
          order by sequence desc
          limit 1
        )
      )
    ),
    said as materialized (
      select
        words,
        (
          select min(sequence)
          from known
          where response_id = call
            or lower(hex(call_id)) = replace(lower(call), '-', '')
            or number = at
        ) as sequence
      from told
    )
    select json_group_array(json_object('sequence', sequence, 'source', source, 'declared', declared, 'state', state))
    from (
      select
        known.sequence,
        case when named.sequence is not null then 'outcome' when window_up then 'window' end as source,
        words as declared,
        case
          when window_up or named.sequence is not null then case decision when 'root' then 'both' else 'declared_only' end
          when role in ('title', 'summary') then 'side_call'
          when counts_windows or exists (select 1 from told) then 'found_only'
          else 'not_declaring'
        end as state
      from known
      left join (select sequence, min(words) as words from said group by sequence) as named
        on named.sequence = known.sequence
      where rewritten or window_up or named.sequence is not null
      union all
      select null, 'outcome', words, 'unreadable'
      from said
      where sequence is null
    )
  )
) as line
left join model_call as call on call.sequence = json_extract(line.value, '$.sequence');
