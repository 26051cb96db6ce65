-- The view that went through the whole log when it was asked of one rollout.

-- What harnesses say about their own rewrites, beside the boundaries that were found, a rollout at a time. A harness says so
-- in an outcome, whose declared_rewrites name the first call of each new context, or by a window number that goes up (Codex).
-- State: both; found_only and declared_only; unreadable: a declaration that names no call; side_call: a title or summary
-- request, which is a context of its own; not_declaring: found, in a rollout whose harness declares nothing.
create or replace view declared_vs_found as
select
  rollout.rollout_id,
  line.call_id,
  line.sequence,
  line.reason,
  line.role,
  line.source,
  line.declared,
  line.state
from rollout
cross join lateral (
  with
  known as materialized (
    select
      call_id,
      sequence,
      reason,
      response_id,
      decision,
      decision = 'root' and reason not in ('first_call', 'fresh_context') as rewritten,
      hints::json ->> 'role' as role,
      row_number() over (order by sequence) as number,
      cast(hints::json ->> 'window' as bigint) > lag(cast(hints::json ->> 'window' as bigint)) over (
        partition by hints::json ->> 'thread'
        order by sequence
      ) as window_up,
      bool_or(hints::json ->> 'window' is not null) over () as counts_windows
    from model_call
    where model_call.rollout_id = rollout.rollout_id
  ),
  told as (
    select
      cast(each.value as text) as words,
      case json_typeof(each.value)
        when 'string' then each.value #>> '{}'
        when 'object' then each.value ->> 'call'
      end as call,
      case when json_typeof(each.value) = 'object' then each.value ->> 'at' end as at
    from json_array_elements(
      (
        select declared_rewrites::json
        from rollout_outcome
        where rollout_outcome.rollout_id = rollout.rollout_id
        order by sequence desc
        limit 1
      )
    ) as each (value)
  ),
  said as (
    select
      words,
      (
        select min(sequence)
        from known
        where response_id = call
          or cast(call_id as text) = lower(call)
          or cast(number as text) = at
      ) as sequence
    from told
  )
  select
    known.call_id,
    known.sequence,
    known.reason,
    known.role,
    case when named.sequence is not null then 'outcome' when window_up then 'window' end as source,
    named.words as declared,
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
  select null, null, null, null, 'outcome', words, 'unreadable'
  from said
  where sequence is null
) as line;
