-- Which process each worker is. Only adds columns, so older workers may keep running.
-- They cannot be restarted, because a build refuses a database that is newer than itself.
--
-- Runs inside one transaction.

-- Where the worker runs, for the list that operators see. Null means unknown, for example
-- a worker over HTTP.
alter table workers add column host text;
alter table workers add column pid integer;
alter table workers add column version text;
