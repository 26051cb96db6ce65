-- What calls showed the model beside tokens: media by content address, and each occurrence of one in a call.

create table media_object (
  sequence bigint generated always as identity,
  sha256 bytea not null,
  media_type text not null,
  size bigint not null,
  tensors text not null,
  digest bytea not null,
  constraint media_object_pkey primary key (sequence),
  constraint media_object_id_key unique (sha256),
  constraint media_object_sequence check (sequence > 0),
  constraint media_object_digest check (length(digest) = 32 and length(sha256) = 32)
);

create table call_media (
  sequence bigint generated always as identity,
  call_id uuid not null,
  place bigint not null,
  rollout_id text not null,
  modality text not null,
  sha256 bytea not null,
  item_hash bytea not null,
  mm_hash text not null,
  start bigint not null,
  length bigint not null,
  tokens bigint not null,
  geometry text not null,
  at bigint not null,
  digest bytea not null,
  constraint call_media_pkey primary key (call_id, place),
  constraint call_media_sequence check (sequence > 0),
  constraint call_media_digest check (length(digest) = 32 and length(sha256) = 32 and length(item_hash) = 32),
  constraint call_media_counts check (place >= 0 and start >= 0 and length > 0 and tokens > 0 and tokens <= length)
) partition by range (call_id);
create index call_media_order on call_media (sequence);
create index call_media_rollout on call_media (rollout_id, sequence);
create index call_media_object on call_media (sha256);

create trigger media_object_no_change before update or delete on media_object
  for each row execute function refuse_change();
create trigger media_object_no_truncate before truncate on media_object
  for each statement execute function refuse_change();
alter table media_object enable always trigger media_object_no_change;
alter table media_object enable always trigger media_object_no_truncate;

create trigger call_media_no_change before update or delete on call_media
  for each row execute function refuse_change();
create trigger call_media_no_truncate before truncate on call_media
  for each statement execute function refuse_change();
alter table call_media enable always trigger call_media_no_change;
alter table call_media enable always trigger call_media_no_truncate;

create trigger media_object_announced before insert on media_object
  for each statement execute function announce_sequence(6);
alter table media_object enable always trigger media_object_announced;

create trigger call_media_announced before insert on call_media
  for each statement execute function announce_sequence(7);
alter table call_media enable always trigger call_media_announced;

-- As revision 0001 has it, for one table more.
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
end
$$;

-- Partitions of one period go together, so media have those that calls have.
do $$
declare
  each record;
begin
  for each in
    select
      'call_media' || substr(child.relname, length('model_call') + 1) as named,
      regexp_match(pg_get_expr(child.relpartbound, child.oid), 'FROM \(''(.+)''\) TO \(''(.+)''\)') as bounds
    from pg_inherits
    join pg_class as child on child.oid = inhrelid
    where inhparent = 'model_call'::regclass
    order by 1
  loop
    perform make_partition('call_media', each.named, each.bounds[1]::uuid, each.bounds[2]::uuid);
  end loop;
end
$$;

-- Who may append calls appends their media, who may read calls reads them.
do $$
declare
  held record;
begin
  for held in
    select grantee::regrole as holder, given.privilege_type as privilege
    from pg_class
    cross join lateral aclexplode(relacl) as given
    where pg_class.oid = 'model_call'::regclass
      and given.grantee not in (0, relowner)
      and given.privilege_type in ('SELECT', 'INSERT')
  loop
    execute format('grant %s on media_object, call_media to %s', held.privilege, held.holder);
  end loop;
end
$$;
