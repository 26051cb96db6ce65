-- name: reached
-- The highest sequence of each kind of event that is committed.
select
  (select coalesce(max(sequence), 0) from model_call) as calls,
  (select coalesce(max(sequence), 0) from rollout_outcome) as outcomes,
  (select coalesce(max(sequence), 0) from rollout) as rollouts,
  (select coalesce(max(sequence), 0) from trained_row) as trained,
  (select coalesce(max(sequence), 0) from call_intent) as intents,
  (select coalesce(max(sequence), 0) from call_end) as ends,
  (select coalesce(max(sequence), 0) from media_object) as objects,
  (select coalesce(max(sequence), 0) from call_media) as media;

-- name: announced
-- PostgreSQL: of each kind the lowest sequence after which an open transaction may still insert; NULL when there is none.
-- The triggers `..._announced` say how a lock's key holds one.
with announced as (
  select
    classid::bigint >> 16 as kind,
    ((classid::bigint & 65535) << 32) | objid::bigint as sequence
  from pg_locks
  where locktype = 'advisory'
    and objsubid = 1
    and database = (select oid from pg_database where datname = current_database())
)
select
  min(sequence) filter (where kind = 29813) as calls,
  min(sequence) filter (where kind = 29814) as outcomes,
  min(sequence) filter (where kind = 29815) as rollouts,
  min(sequence) filter (where kind = 29816) as trained,
  min(sequence) filter (where kind = 29817) as intents,
  min(sequence) filter (where kind = 29818) as ends,
  min(sequence) filter (where kind = 29819) as objects,
  min(sequence) filter (where kind = 29820) as media
from announced;
