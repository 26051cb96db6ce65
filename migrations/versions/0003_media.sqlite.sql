-- What calls showed the model beside tokens: media by content address, and each occurrence of one in a call.

create table media_object (
  sequence integer not null,
  sha256 blob not null,
  media_type text not null,
  size integer not null,
  tensors text not null,
  digest blob not null,
  constraint media_object_pkey primary key (sequence),
  constraint media_object_id_key unique (sha256),
  constraint media_object_sequence check (sequence > 0),
  constraint media_object_digest check (length(digest) = 32 and length(sha256) = 32)
) strict;

create table call_media (
  sequence integer not null,
  call_id blob not null,
  place integer not null,
  rollout_id text not null,
  modality text not null,
  sha256 blob not null,
  item_hash blob not null,
  mm_hash text not null,
  start integer not null,
  length integer not null,
  tokens integer not null,
  geometry text not null,
  at integer not null,
  digest blob not null,
  constraint call_media_pkey primary key (sequence),
  constraint call_media_id_key unique (call_id, place),
  constraint call_media_sequence check (sequence > 0),
  constraint call_media_digest check (length(digest) = 32 and length(sha256) = 32 and length(item_hash) = 32),
  constraint call_media_counts check (place >= 0 and start >= 0 and length > 0 and tokens > 0 and tokens <= length),
  constraint call_media_ids check (length(call_id) = 16)
) strict;
create index call_media_rollout on call_media (rollout_id, sequence);
create index call_media_object on call_media (sha256);

create trigger media_object_no_update before update on media_object
begin
  select raise(abort, 'media_object is append-only: events are never changed, append a new event');
end;

create trigger media_object_no_delete before delete on media_object
begin
  select raise(abort, 'media_object is append-only: events are never deleted');
end;

create trigger media_object_insert_once before insert on media_object
begin
  select raise(ignore)
  where exists (select 1 from media_object where sha256 = new.sha256 and digest = new.digest);
  select raise(abort, 'media_object: this id is already in the log with other content, and events are never changed')
  where exists (select 1 from media_object where sha256 = new.sha256);
  select raise(abort, 'media_object: this sequence is already used')
  where exists (select 1 from media_object where sequence = new.sequence);
end;

create trigger call_media_no_update before update on call_media
begin
  select raise(abort, 'call_media is append-only: events are never changed, append a new event');
end;

create trigger call_media_no_delete before delete on call_media
begin
  select raise(abort, 'call_media is append-only: events are never deleted');
end;

create trigger call_media_insert_once before insert on call_media
begin
  select raise(ignore)
  where exists (select 1 from call_media where call_id = new.call_id and place = new.place and digest = new.digest);
  select raise(abort, 'call_media: this id is already in the log with other content, and events are never changed')
  where exists (select 1 from call_media where call_id = new.call_id and place = new.place);
  select raise(abort, 'call_media: this sequence is already used')
  where exists (select 1 from call_media where sequence = new.sequence);
end;
