-- The tally: which sequences were given to events, so that a deleted event is missed, the last one too. Gaps are no sign of
-- that here, for what is rolled back leaves some.
-- A line is a run of sequences of one table that one statement inserted, and is durable with its events or not at all. No
-- key and no index: it is read as a whole. This revision is not in one transaction, and can run again from its start.

create table if not exists tally (
  table_name text not null,
  low bigint not null,
  high bigint not null,
  dropped boolean not null,
  constraint tally_run check (low > 0 and low <= high)
);

create or replace trigger tally_no_change before update or delete on tally
  for each row execute function refuse_change();
create or replace trigger tally_no_truncate before truncate on tally
  for each statement execute function refuse_change();
alter table tally enable always trigger tally_no_change;
alter table tally enable always trigger tally_no_truncate;

-- After each statement, also a COPY; with its owner's rights, so that nobody else needs any to the tally.
create or replace function tally_appended() returns trigger language plpgsql security definer set search_path from current
as $$
begin
  insert into tally (table_name, low, high, dropped)
  select tg_argv[0], min(sequence), max(sequence), false
  from (select sequence, sequence - row_number() over (order by sequence) as run from appended) as each
  group by run;
  return null;
end
$$;
revoke execute on function tally_appended() from public;  -- nobody puts it on a table of their own

-- From now on what is inserted into a table, or by its own name into this partition of it, is tallied. Waits for whoever
-- inserts just now, so that an event is either there already or tallied.
create or replace function tally_appends(parent text, named regclass) returns void language plpgsql as $$
begin
  execute format(
    'create or replace trigger %I after insert on %s referencing new table as appended'
    ' for each statement execute function tally_appended(%L)',
    parent || '_tallied', named, parent
  );
  execute format('alter table %s enable always trigger %I', named, parent || '_tallied');
end
$$;

-- As revision 0003 has it, and tallied.
create or replace function make_partition(parent text, named text, low uuid, high uuid) returns void language plpgsql as $$
declare
  kind text := case parent when 'model_call' then '0' when 'call_intent' then '4' when 'call_end' then '5' when 'call_media' then '7' end;
begin
  execute format('create table %I (like %I including constraints including storage)', named, parent);
  execute format(
    'alter table %I attach partition %I %s', parent, named,
    case when low is null then 'default' else format('for values from (%L) to (%L)', low, high) end
  );
  execute format(
    'create trigger %I before truncate on %I for each statement execute function refuse_change()',
    parent || '_no_truncate', named
  );
  execute format('alter table %I enable always trigger %I', named, parent || '_no_truncate');
  execute format(
    'create trigger %I before insert on %I for each statement execute function announce_sequence(%s)',
    parent || '_announced', named, kind
  );
  execute format('alter table %I enable always trigger %I', named, parent || '_announced');
  perform tally_appends(parent, format('%I', named)::regclass);
end
$$;

-- A partition goes, and its events with it: for its owner, once they are kept elsewhere. The tally says which went.
create or replace function drop_partition(parent text, named text) returns void language plpgsql as $$
begin
  execute format(
    'insert into tally (table_name, low, high, dropped)'
    ' select %1$L, min(sequence), max(sequence), true'
    ' from (select sequence, sequence - row_number() over (order by sequence) as run from %2$I) as each'
    ' group by run',
    parent, named
  );
  execute format('alter table %I detach partition %I', parent, named);
  execute format('drop table %I', named);
end
$$;

-- Who reads everything reads the tally.
do $$
declare
  held record;
begin
  for held in
    select grantee::regrole as holder
    from pg_class
    cross join lateral aclexplode(relacl) as given
    where pg_class.oid = 'trained_row'::regclass
      and given.grantee not in (0, relowner)
      and given.privilege_type = 'SELECT'
  loop
    execute format('grant select on tally to %s', held.holder);
  end loop;
end
$$;
