-- name: history
-- Judges every rollout of an outline by a policy: one line a rollout, in order of opening, with the first reason that
-- keeps it out, or null. A bound that is null holds nothing back. Reads outline (one line a row) and trained (run, step,
-- rollout_id); a group is counted once all other reasons are known.
with

recorded as (
  select
    rollout_id,
    any_value(group_id) as group_id,
    any_value(reward) as reward,
    any_value(task) as task,
    any_value(harness) as harness,
    any_value(opened_at) as opened_at,
    max(completed_at) as completed_at,
    min(oldest) as oldest,
    max(newest) as newest,
    count(*) as rows,
    sum(trained)::bigint as trained_tokens
  from outline
  group by rollout_id
),

earlier as (
  select
    rollout_id,
    count(distinct (run, step)) as times_trained
  from trained
  where :trained_in is null
    or run = :trained_in
  group by rollout_id
),

judged as (
  select
    recorded.*,
    coalesce(times_trained, 0) as times_trained,
    case
      when reward is null
        then 'not_scored'
      when oldest is null
        then 'trains_nothing'
      when opened_at < :opened_since::bigint or opened_at >= :opened_until::bigint
        then 'opened_outside'
      when completed_at < :completed_since::bigint or completed_at >= :completed_until::bigint
        then 'completed_outside'
      when len(:tasks) > 0 and not exists (
        select 1
        from unnest(:tasks) as wanted (pattern)
        where task = pattern or task glob pattern
      )
        then 'other_task'
      when len(:harnesses) > 0 and not exists (
        select 1
        from unnest(:harnesses) as wanted (pattern)
        where harness = pattern or harness glob pattern
      )
        then 'other_harness'
      when reward < :min_reward::double or reward > :max_reward::double
        then 'reward_outside'
      when oldest < :oldest_version::bigint or newest > :newest_version::bigint
        then 'version_outside'
      when :trainer_version::bigint - oldest > :max_staleness::bigint
        then 'too_stale'
      when coalesce(times_trained, 0) > :max_trained::bigint
        then 'trained_before'
    end as reason
  from recorded
  left join earlier using (rollout_id)
)

select
  * replace (
    case
      when reason is null and :min_group > case
        when group_id is null then 1
        else count(*) filter (where reason is null) over (partition by group_id)
      end
        then 'group_too_small'
      else reason
    end as reason
  )
from judged
order by opened_at, rollout_id
