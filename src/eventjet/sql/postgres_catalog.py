"""Queries of PostgreSQL's catalogues: a table's features, dependents, rights, indexes and identity."""

from __future__ import annotations

from sqlalchemy import text

PATH = text("select current_setting('search_path')")
SET_PATH = text("select set_config('search_path', :path, true)")
DEPENDENTS = text("""
with recursive part(classid, objid) as (
    select 'pg_class'::regclass::oid, cast(:oid as oid)
  union
    select d.classid, d.objid from part p
      join pg_depend d on d.refclassid = p.classid and d.refobjid = p.objid and d.deptype in ('a', 'i')
      left join pg_class c on d.classid = 'pg_class'::regclass and c.oid = d.objid
      left join pg_type t on d.classid = 'pg_type'::regclass and t.oid = d.objid
      left join pg_constraint k on d.classid = 'pg_constraint'::regclass and k.oid = d.objid
      left join pg_attrdef f on d.classid = 'pg_attrdef'::regclass and f.oid = d.objid
     where c.relkind in ('i', 'S', 't') or t.typrelid = :oid or t.typtype = 'b' or f.adrelid = :oid
        or (k.conrelid = :oid and k.contype <> 'f')
), dependent as (
    select distinct d.classid, d.objid, d.objsubid from part p
      join pg_depend d on d.refclassid = p.classid and d.refobjid = p.objid
     where not exists (select from part o where o.classid = d.classid and o.objid = d.objid)
)
select case
         when r.oid is not null and r.ev_class = :oid then 'the rule ' || r.rulename
         when r.oid is not null and r.rulename = '_RETURN'
           then 'the ' || (pg_identify_object('pg_class'::regclass, r.ev_class, 0)).type || ' '
                || (pg_identify_object('pg_class'::regclass, r.ev_class, 0)).identity
         when k.contype = 'f' then 'the foreign key ' || k.conname || ' of ' || k.conrelid::regclass
         when t.tgrelid = :oid then 'the trigger ' || t.tgname
         when y.polrelid = :oid then 'the policy ' || y.polname
         else 'the ' || pg_describe_object(d.classid, d.objid, d.objsubid)
       end
  from dependent d
  left join pg_rewrite r on d.classid = 'pg_rewrite'::regclass and r.oid = d.objid
  left join pg_constraint k on d.classid = 'pg_constraint'::regclass and k.oid = d.objid
  left join pg_trigger t on d.classid = 'pg_trigger'::regclass and t.oid = d.objid
  left join pg_policy y on d.classid = 'pg_policy'::regclass and y.oid = d.objid
 where t.tgisinternal is not true
   and d.classid <> 'pg_catalog.pg_publication_rel'::regclass
   and not (k.contype is not distinct from 'f' and k.conrelid = any(:along) and k.confrelid = any(:along))
union
select 'row-level security' from pg_class where oid = :oid and (relrowsecurity or relforcerowsecurity)
union
select 'the publication ' || p.pubname from pg_publication_rel r join pg_publication p on p.oid = r.prpubid
 where r.prrelid = :oid
union
select 'a subscription' from pg_subscription_rel where srrelid = :oid
union
select 'the inheritance from ' || inhparent::regclass from pg_inherits where inhrelid = :oid
union
select 'the type ' || reloftype::regtype from pg_class where oid = :oid and reloftype <> 0
union
select case relkind when 'p' then 'the partitioning' when 'f' then 'the foreign server' else 'what is no table' end
  from pg_class where oid = :oid and relkind <> 'r'
union
select 'the extension ' || e.extname from pg_depend d join pg_extension e on e.oid = d.refobjid
 where d.classid = 'pg_class'::regclass and d.objid = :oid and d.refclassid = 'pg_extension'::regclass
union
select 'the security label of ' || provider from pg_seclabel where classoid = 'pg_class'::regclass and objoid = :oid
order by 1
""")

FEATURES = text(r"""
with its as (
    select c.*, cast(:heir as text) as heir, cast(:schema as text) as schema from pg_class c where c.oid = :oid
), columns as (
    select t.*, quote_ident(t.attname) as name, to_jsonb(t) ->> 'attcompression' as compression
      from pg_attribute t where t.attrelid = :oid and t.attnum > 0 and not t.attisdropped
), rules as (
    select * from pg_constraint where conrelid = :oid and contype in ('c', 'u', 'p', 'x', 'f')
), indexes as (
    select c.oid, c.relname, c.reloptions, c.reltablespace, i.indisclustered, i.indisreplident,
           exists (select from rules k where k.conindid = c.oid) as is_of_rule
      from pg_index i join pg_class c on c.oid = i.indexrelid where i.indrelid = :oid
), sequences as (
    select s.oid, s.relname, t.attname, q.* from pg_depend d
      join pg_class s on s.oid = d.objid and s.relkind = 'S'
      join pg_sequence q on q.seqrelid = s.oid
      join pg_attribute t on t.attrelid = d.refobjid and t.attnum = d.refobjsubid
     where d.classid = 'pg_class'::regclass and d.deptype in ('a', 'i') and d.refobjid = :oid
)
select 'column ' || attname as key, 'the column ' || name as words, '' as definition, null::text as carried, '' as needs
  from columns
union all
select 'type ' || attname || ' ' || format_type(atttypid, atttypmod), '', '', null, '' from columns
union all
select 'not null ' || attname, 'NOT NULL of the column ' || name, '', null, '' from columns
 where attnotnull and not exists (select from rules where contype = 'p' and attnum = any(conkey))
union all
select 'default ' || attname,
       case attgenerated when '' then 'the default of the column ' else 'how it generates the column ' end || name,
       -- '1' and 1 are the same to a column.
       name || case attgenerated when '' then ' default ' when 's' then ' stored as ' else ' virtual as ' end
            || regexp_replace(pg_get_expr(adbin, adrelid), '^''(-?[0-9.]+)''::[a-z ]+$', '\1'),
       null, '' from columns join pg_attrdef on adrelid = attrelid and adnum = attnum
union all
select 'identity ' || attname, 'the identity of the column ' || name,
       name || case attidentity when 'a' then ' generated always' else ' generated by default' end, null, ''
  from columns where attidentity <> ''
union all
select 'collation ' || attname, 'the collation of the column ' || name,
       name || ' collate ' || attcollation::regcollation, null, ''
  from columns join pg_type y on y.oid = atttypid where attcollation <> typcollation
union all
select 'sequence ' || relname, 'the sequence ' || relname || ' of the column ' || attname,
       -- The greatest value is mostly its type's, which is the column's.
       concat(relname, ' of ', attname, ' start ', seqstart, ' increment ', seqincrement, ' minvalue ', seqmin,
              case when seqmax not in (32767, 2147483647, 9223372036854775807) then ' maxvalue ' || seqmax end,
              ' cache ', seqcache, case when seqcycle then ' cycle' end), null, '' from sequences
union all
select 'constraint ' || conname, case contype when 'f' then 'the foreign key ' else 'the constraint ' end || conname,
       case contype
         when 'f' then regexp_replace(pg_get_constraintdef(oid), 'REFERENCES [^(]*\.', 'REFERENCES ')
         else regexp_replace(pg_get_constraintdef(oid), ' NOT VALID$', '')
       end, null, '' from rules
union all
select 'index ' || relname, case when is_of_rule then '' else 'the index ' || relname end,
       -- Its options are carried over.
       regexp_replace(pg_get_indexdef(oid, 0, true), case when reloptions is null then '^$' else ' WITH \([^)]*\)' end,
                      ''), null, '' from indexes
union all
select 'persistence ' || relpersistence::text, 'being UNLOGGED', '', null, '' from its where relpersistence = 'u'
union all
select 'access ' || amname, 'the access method ' || amname, '', null, '' from its join pg_am a on a.oid = relam
union all
select 'tablespace ' || spcname, 'the tablespace ' || spcname, '', null, ''
  from its join pg_tablespace p on p.oid = reltablespace
union all
select 'tablespace ' || relname || ' ' || spcname, 'the tablespace ' || spcname || ' of the index ' || relname,
       '', null, ''
  from indexes join pg_tablespace p on p.oid = reltablespace
union all
select 'option ' || split_part(o, '=', 1), '', '', format('alter table %s set (%s)', heir, o), ''
  from its cross join unnest(reloptions) o
union all
select 'toast ' || split_part(o, '=', 1), '', '', format('alter table %s set (toast.%s)', heir, o), ''
  from its join pg_class s on s.oid = its.reltoastrelid cross join unnest(s.reloptions) o
union all
select 'option ' || i.relname || ' ' || split_part(o, '=', 1),
       format('the option %s of the index %s', o, i.relname), '',
       format('alter index %s.%I set (%s)', schema, i.relname, o), 'index ' || i.relname
  from its cross join indexes i cross join unnest(i.reloptions) o
union all
select 'comment', '', '', format('comment on table %s is %L', heir, description), ''
  from its join pg_description on classoid = 'pg_class'::regclass and objoid = :oid and objsubid = 0
union all
select 'comment of type', '', '', format('comment on type %s is %L', heir, description), ''
  from its join pg_description on classoid = 'pg_type'::regclass and objoid = its.reltype
union all
select 'comment ' || attname, '', '', format('comment on column %s.%I is %L', heir, attname, description),
       'column ' || attname
  from its cross join columns
  join pg_description on classoid = 'pg_class'::regclass and objoid = :oid and objsubid = attnum
union all
-- Only what has a name of its own in the declaration is found again by its name.
select 'comment of constraint ' || conname, 'the comment of the constraint ' || conname, '',
       format('comment on constraint %I on %s is %L', conname, heir, description), 'constraint ' || conname
  from its join pg_constraint k on k.conrelid = its.oid
  join pg_description on classoid = 'pg_constraint'::regclass and objoid = k.oid
union all
select 'comment of index ' || i.relname, 'the comment of the index ' || i.relname, '',
       format('comment on index %s.%I is %L', schema, i.relname, description), 'index ' || i.relname
  from its cross join indexes i join pg_description on classoid = 'pg_class'::regclass and objoid = i.oid
union all
select 'comment of sequence ' || s.relname, '', '',
       format('comment on sequence %s.%I is %L', schema, s.relname, description), 'sequence ' || s.relname
  from its cross join sequences s join pg_description on classoid = 'pg_class'::regclass and objoid = s.oid
union all
select 'statistics ' || attname, '', '',
       format('alter table %s alter column %I set statistics %s', heir, attname, attstattarget), 'column ' || attname
  from its cross join columns where attstattarget >= 0
union all
select 'option of column ' || attname || ' ' || split_part(o, '=', 1), '', '',
       format('alter table %s alter column %I set (%s)', heir, attname, o), 'column ' || attname
  from its cross join columns cross join unnest(attoptions) o
union all
select 'storage ' || attname, '', '',
       format('alter table %s alter column %I set storage %s', heir, attname,
              case attstorage when 'p' then 'plain' when 'e' then 'external' when 'm' then 'main' else 'extended' end),
       'type ' || attname || ' ' || format_type(atttypid, atttypmod)
  from its cross join columns join pg_type y on y.oid = atttypid where attstorage <> typstorage
union all
select 'compression ' || attname, '', '',
       format('alter table %s alter column %I set compression %s', heir, attname,
              case compression when 'l' then 'lz4' else 'pglz' end),
       'type ' || attname || ' ' || format_type(atttypid, atttypmod)
  from its cross join columns where compression in ('l', 'p')
union all
select 'replica identity', '', '',
       format('alter table %s replica identity %s', heir, case relreplident when 'f' then 'full' else 'nothing' end), ''
  from its where relreplident in ('f', 'n')
union all
select 'replica identity', 'the replica identity by the index ' || i.relname, '',
       format('alter table %s replica identity using index %I', heir, i.relname), 'index ' || i.relname
  from its cross join indexes i where indisreplident and relreplident = 'i'
union all
select 'clustered', 'CLUSTER ON the index ' || i.relname, '',
       format('alter table %s cluster on %I', heir, i.relname), 'index ' || i.relname
  from its cross join indexes i where indisclustered
union all
-- A statement grants in the owner's name, and what that grants outlives the right to pass it on.
select concat_ws(' ', 'right', r.grantor, r.grantee, privilege_type),
       format('the right %s of %s that %s has passed on', privilege_type,
              case r.grantee when 0 then 'public' else pg_get_userbyid(r.grantee) end, pg_get_userbyid(r.grantor)),
       '', null, ''
  from its cross join (select relacl from its union all select attacl from columns) a(acl)
 cross join lateral aclexplode(acl) r where r.grantor <> relowner
""")

OWNER = text("""
select format('alter table %s owner to %I', h.oid::regclass, pg_get_userbyid(c.relowner))
  from pg_class c, pg_class h where c.oid = :old and h.oid = :heir and c.relowner <> h.relowner
""")

RIGHTS = text("""
with owned as (
    select d.refobjid as relation, t.attname, s.oid, s.relacl, s.relowner from pg_depend d
      join pg_class s on s.oid = d.objid and s.relkind = 'S'
      join pg_attribute t on t.attrelid = d.refobjid and t.attnum = d.refobjsubid
     where d.classid = 'pg_class'::regclass and d.deptype in ('a', 'i') and d.refobjid in (:old, :heir)
), pair(target, columns, before, after) as (
    select 'table ' || h.oid::regclass, '', coalesce(c.relacl, acldefault('r', c.relowner)),
           coalesce(h.relacl, acldefault('r', h.relowner))
      from pg_class c, pg_class h where c.oid = :old and h.oid = :heir
  union all
    select 'table ' || h.attrelid::regclass, format(' (%I)', h.attname),
           t.attacl, h.attacl
      from pg_attribute t join pg_attribute h on h.attname = t.attname
     where t.attrelid = :old and h.attrelid = :heir and t.attnum > 0 and h.attnum > 0
       and not t.attisdropped and not h.attisdropped
  union all
    select 'sequence ' || h.oid::regclass, '', coalesce(s.relacl, acldefault('s', s.relowner)),
           coalesce(h.relacl, acldefault('s', h.relowner))
      from owned s join owned h on h.attname = s.attname where s.relation = :old and h.relation = :heir
  union all
    select 'type ' || h.oid::regtype, '', coalesce(t.typacl, acldefault('T', t.typowner)),
           coalesce(h.typacl, acldefault('T', h.typowner))
      from pg_type t, pg_type h where t.typrelid = :old and h.typrelid = :heir
), before as (
    select target, columns, grantee, privilege_type, bool_or(is_grantable) as passes_on
      from pair cross join lateral aclexplode(before) group by 1, 2, 3, 4
), after as (
    select target, columns, grantee, privilege_type, bool_or(is_grantable) as passes_on
      from pair cross join lateral aclexplode(after) group by 1, 2, 3, 4
)
select format('revoke %s%s%s on %s from %s', case when b.grantee is null then '' else 'grant option for ' end,
              privilege_type, columns, target,
              case grantee when 0 then 'public' else quote_ident(pg_get_userbyid(grantee)) end)
  from after a left join before b using (target, columns, grantee, privilege_type)
 where b.passes_on is null or (a.passes_on and not b.passes_on)
union all
select format('grant %s%s on %s to %s%s', privilege_type, columns, target,
              case grantee when 0 then 'public' else quote_ident(pg_get_userbyid(grantee)) end,
              case when b.passes_on then ' with grant option' else '' end)
  from before b left join after a using (target, columns, grantee, privilege_type)
 where a.passes_on is null or (b.passes_on and not a.passes_on)
""")

KEEP_TO_INDEXES = text(
    "select set_config(name, 'off', true) from unnest(array['enable_seqscan', 'enable_bitmapscan', 'enable_sort']) name"
)

# Prefers an index in the column's own order (PLAIN), as a primary key exists anyway. Only in UTF-8 are bytes in the
# order of code points. The columns that name locale providers came with PostgreSQL 15 and 17, hence the rows as JSON.
ORDER = text("""
with here as (
  select pg_encoding_to_char(d.encoding) = 'UTF8' as is_utf8,
         coalesce(to_jsonb(d) ->> 'datlocprovider', 'c') = 'b'
         or (coalesce(to_jsonb(d) ->> 'datlocprovider', 'c') = 'c'
             and d.datcollate in ('C', 'POSIX', 'C.UTF-8', 'C.utf8')) as by_bytes
    from pg_database d where d.datname = current_database()
), indexed as (
  select o.opcname as kind, k.collname as sorts
    from pg_index i
    join pg_class c on c.oid = i.indexrelid
    join pg_am m on m.oid = c.relam and m.amname = 'btree'
    join pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
    join pg_opclass o on o.oid = i.indclass[0]
    left join pg_collation k on k.oid = i.indcollation[0]
   where i.indrelid = :oid and a.attname = :column and i.indisvalid and i.indpred is null
)
select case when kind in ('text_pattern_ops', 'varchar_pattern_ops') then 'PATTERN'
            when sorts = 'default' then 'PLAIN'
            else 'BYTES' end as found
  from indexed, here
 where is_utf8 and (kind in ('text_pattern_ops', 'varchar_pattern_ops')
                    or (kind in ('text_ops', 'varchar_ops')
                        and (sorts in ('C', 'POSIX') or (sorts = 'default' and by_bytes))))
 order by found desc limit 1
""")

FIND = text("""
select c.oid, n.nspname, c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where c.oid = to_regclass(:name)
""")

HOME = text("""
select concat_ws('/', system_identifier, d.oid, to_regclass('eventjet_projection')::oid)
  from pg_control_system(), pg_database d where d.datname = current_database()
""")
