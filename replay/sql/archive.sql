-- Questions of sealing, in words that SQLite and PostgreSQL share.

-- name: finished
-- Rollouts of which nothing happened at or after a time and nothing is still running, in the order of rows; how many
-- completed calls each has and how many tokens these add. When one was trained on does not count.
with own as (
  select rollout_id, opened_at as at, opened_at, 0 as calls, 0 as tokens
  from rollout
  union all
  select rollout_id, at, null, 0, 0
  from call_intent
  union all
  select rollout_id, completed_at, null, 1, prompt_len - prev_len + sampled_len
  from model_call
  union all
  select rollout_id, at, null, 0, 0
  from call_end
  union all
  select rollout_id, at, null, 0, 0
  from rollout_outcome
)

select
  rollout_id,
  coalesce(min(opened_at), 0) as opened_at,
  min(at) as begun_at,
  cast(sum(calls) as bigint) as calls,
  cast(sum(tokens) as bigint) as tokens
from own
group by rollout_id
having max(at) < :before
  and rollout_id not in (
    select rollout_id
    from call_intent
    where not exists (select 1 from model_call where model_call.call_id = call_intent.call_id)
      and not exists (select 1 from call_end where call_end.call_id = call_intent.call_id)
  )
order by 2, 1
