-- Which process each worker is. Only adds columns, so older workers may keep running.
-- They cannot be restarted, because a build refuses a database that is newer than itself.
--
-- Runs inside one transaction. `longshore.` is replaced by the configured schema.

-- Where the worker runs, for the list that operators see. Null means unknown, for example
-- a worker over HTTP.
alter table longshore.workers add column host text;
alter table longshore.workers add column pid bigint;
alter table longshore.workers add column version text;
