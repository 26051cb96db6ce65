-- name: listed
-- Every partition with its bounds as PostgreSQL writes them, what it takes on disk, and about how many events it holds.
select
  parent.relname as table_name,
  child.relname as name,
  pg_get_expr(child.relpartbound, child.oid) as bounds,
  greatest(child.reltuples, 0)::bigint as events,
  pg_total_relation_size(child.oid) as bytes
from pg_inherits
join pg_class as parent on parent.oid = inhparent
join pg_class as child on child.oid = inhrelid
where parent.relnamespace = current_schema()::regnamespace
  and parent.relname in ('model_call', 'call_intent', 'call_end', 'call_media')
order by 1, 2;

-- name: unguarded
-- Triggers that a partition lacks, or that would not fire for a replica.
select child.relname || '.' || wanted.tgname
from pg_inherits
join pg_class as parent on parent.oid = inhparent
join pg_class as child on child.oid = inhrelid
join pg_trigger as wanted on wanted.tgrelid = parent.oid and not wanted.tgisinternal
left join pg_trigger as found
  on found.tgrelid = child.oid and found.tgname = wanted.tgname and found.tgenabled = 'A'
where parent.relnamespace = current_schema()::regnamespace
  and parent.relname in ('model_call', 'call_intent', 'call_end', 'call_media')
  and found.oid is null;

-- name: held
-- How many events of a range of ids the default partition of a table holds, and its lowest and highest id.
select events, lowest, highest
from default_holds(:parent, :low, :high);

-- name: make
-- A new partition, empty.
select make_partition(:parent, :named, :low, :high);

-- name: adopt
-- The default partition becomes the one of this range, and an empty one takes its place.
select adopt_default(:parent, :named, :low, :high);

-- name: drop
-- A partition goes with all its events.
select drop_partition(:parent, :named);

-- name: renew
-- An empty default partition, in the place of one that went.
select make_partition(:parent, :named, null, null);
