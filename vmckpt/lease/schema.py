"""The lease store's schema in PostgreSQL: tables that only their owner may access, and functions.

The agents of a protection have their own role, which may only call AGENT_CALLS; `session_user`
selects the lease. Each call locks the row of that lease first and reads the clock afterwards.

* A renewal need not be on disk when it is answered (`synchronous_commit` off). The loss of renewals
  in a crash is detected: PostgreSQL empties the unlogged table `memory` in every recovery. This
  happens after a crash of the machine, after a crash of one backend (the postmaster then keeps
  running), and when a replica is promoted. While `memory` is empty, every lease counts as just
  renewed.
* A changed token is on disk, and on the synchronous replicas, before the call returns it.
* `beat` changes with each renewal and whenever `memory` was lost. If a host has seen the same beat
  for ttl + margin, there was no renewal, even if the database's clock was set forward. The host
  measures this time *by its own clock, which is never set*. A takeover requires this in addition to
  the wait by the database's clock.
* `timeline` is the PostgreSQL timeline on which the token was created or last renewed. A promoted
  replica starts a new timeline, and may lack changes that the old server had confirmed, for example
  that a standby is invalid. So no takeover is possible on a timeline on which the token was neither
  created nor confirmed by its holder. This does not apply if all changes were on the synchronous
  replicas. The holder sends the timeline of the last answer that it received, so a renewal that was
  sent before the promotion and arrives late confirms nothing.

Pure.
"""

LAYOUT = 2
"""Version of the tables and functions; a higher version was created by a newer vmckpt."""
LOCK = 0x766D636B6C73
"""Number of the advisory lock that is held while the tables and functions are created."""
SCHEMA = "vmckpt_lease"
AGENT_CALLS = (
    "acquire(text, text)",
    "acquire_again(text, text, bigint)",
    "renew(bigint, text)",  # for agents that were started before layout 2
    "renew_on(bigint, text, text)",
    "validate(bigint, text)",
    "invalidate(bigint, text, text)",
    "take_over(bigint, text, text, text, float8)",
    "hand_over(bigint, text, text, text)",
    "release(bigint, text)",
    "look()",
)

TABLES = """
CREATE SCHEMA IF NOT EXISTS vmckpt_lease;
REVOKE ALL ON SCHEMA vmckpt_lease FROM PUBLIC;
CREATE TABLE IF NOT EXISTS vmckpt_lease.layout (version int NOT NULL);
CREATE TABLE IF NOT EXISTS vmckpt_lease.lease (
    guest uuid PRIMARY KEY,
    session text NOT NULL,
    role name UNIQUE,
    ttl float8 NOT NULL,
    margin float8 NOT NULL,
    state text NOT NULL CHECK (state IN ('free', 'held', 'protected', 'ended')),
    token bigint NOT NULL,
    holder text,
    claim text,
    renewed_at timestamptz NOT NULL,
    beat uuid NOT NULL,
    timeline text,
    synchronous boolean
) WITH (fillfactor = 50);
CREATE UNLOGGED TABLE IF NOT EXISTS vmckpt_lease.memory (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    since timestamptz NOT NULL DEFAULT clock_timestamp()
);
REVOKE ALL ON ALL TABLES IN SCHEMA vmckpt_lease FROM PUBLIC;
"""
UPGRADE = """
ALTER TABLE vmckpt_lease.lease ADD COLUMN timeline text, ADD COLUMN synchronous boolean;
"""
"""Statements that upgrade the tables from layout 1."""

_HEAD = "LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, vmckpt_lease, pg_temp"

# waits(): the wait for a takeover is counted from the latest timestamp that is not in the future.
_PARTS = f"""
CREATE OR REPLACE FUNCTION vmckpt_lease.mine() RETURNS vmckpt_lease.lease {_HEAD} AS $$
DECLARE l vmckpt_lease.lease;
BEGIN
    -- Overrides a server whose default does not wait for the disk.
    PERFORM set_config('synchronous_commit', 'on', true);
    INSERT INTO memory DEFAULT VALUES ON CONFLICT DO NOTHING;
    SELECT * INTO l FROM lease WHERE role = session_user FOR UPDATE;
    RETURN l;
END $$;

CREATE OR REPLACE FUNCTION vmckpt_lease.timeline() RETURNS text {_HEAD} AS $$
BEGIN
    RETURN left(pg_walfile_name(pg_current_wal_lsn()), 8);
END $$;

CREATE OR REPLACE FUNCTION vmckpt_lease.waits(l vmckpt_lease.lease) RETURNS float8 {_HEAD} AS $$
DECLARE
    now_is timestamptz := clock_timestamp();
    last_at timestamptz;
BEGIN
    SELECT max(at) INTO last_at
      FROM (SELECT l.renewed_at UNION ALL SELECT pg_postmaster_start_time()
            UNION ALL SELECT since FROM memory) AS stamps (at)
     WHERE at <= now_is;
    RETURN coalesce(
        greatest(l.ttl + l.margin - extract(epoch FROM now_is - last_at)::float8, 0), 0);
END $$;

CREATE OR REPLACE FUNCTION vmckpt_lease.beat_of(l vmckpt_lease.lease) RETURNS text {_HEAD} AS $$
BEGIN
    RETURN (SELECT id::text FROM memory) || '/' || l.beat::text;
END $$;

CREATE OR REPLACE FUNCTION vmckpt_lease.change(
    l vmckpt_lease.lease, p_holder text, p_state text, p_claim text
) RETURNS bigint {_HEAD} AS $$
BEGIN
    UPDATE lease SET token = l.token + 1, holder = p_holder, state = p_state, claim = p_claim,
        renewed_at = clock_timestamp(), beat = gen_random_uuid(), timeline = timeline()
     WHERE guest = l.guest;
    RETURN l.token + 1;
END $$;

CREATE OR REPLACE FUNCTION vmckpt_lease.refusal(
    l vmckpt_lease.lease, p_token bigint, p_holder text
) RETURNS jsonb {_HEAD} AS $$
BEGIN
    IF l.guest IS NULL THEN
        RETURN jsonb_build_object('said', 'lost', 'why', 'there is no lease for this login');
    ELSIF l.holder IS NULL THEN
        RETURN jsonb_build_object('said', 'lost', 'why', 'no host holds the lease');
    ELSIF l.holder <> p_holder THEN
        RETURN jsonb_build_object('said', 'lost', 'why', l.holder || ' holds the lease');
    ELSIF l.token <> p_token THEN
        RETURN jsonb_build_object('said', 'lost', 'why',
            'token ' || p_token || ' is not current; the current token is ' || l.token);
    END IF;
    RETURN NULL;
END $$;
"""

_CALLS = f"""
CREATE OR REPLACE FUNCTION vmckpt_lease.acquired(p_token bigint) RETURNS jsonb {_HEAD} AS $$
BEGIN
    RETURN jsonb_build_object('said', 'done', 'token', p_token, 'timeline', timeline());
END $$;


CREATE OR REPLACE FUNCTION vmckpt_lease.acquire_again(p_holder text, p_claim text, p_after bigint)
RETURNS jsonb {_HEAD} AS $$
DECLARE l vmckpt_lease.lease := mine();
BEGIN
    IF l.guest IS NULL OR coalesce(l.holder, p_holder) <> p_holder THEN
        RETURN refusal(l, l.token, p_holder);
    ELSIF l.holder = p_holder AND l.claim = p_claim THEN
        RETURN acquired(l.token);
    END IF;
    l.token := greatest(l.token, p_after);
    RETURN acquired(change(l, p_holder, 'held', p_claim));
END $$;

CREATE OR REPLACE FUNCTION vmckpt_lease.acquire(p_holder text, p_claim text)
RETURNS jsonb {_HEAD} AS $$
BEGIN
    RETURN acquire_again(p_holder, p_claim, 0);
END $$;

CREATE OR REPLACE FUNCTION vmckpt_lease.renew_on(p_token bigint, p_holder text, p_timeline text)
RETURNS jsonb {_HEAD} AS $$
DECLARE
    now_on text := timeline();
    l vmckpt_lease.lease;
    state_is text;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    INSERT INTO memory DEFAULT VALUES ON CONFLICT DO NOTHING;
    UPDATE lease SET renewed_at = clock_timestamp(), beat = gen_random_uuid(),
        timeline = CASE WHEN p_timeline = now_on THEN now_on ELSE lease.timeline END,
        synchronous = current_setting('synchronous_standby_names') <> ''
     WHERE role = session_user AND token = p_token AND holder = p_holder
     RETURNING lease.state INTO state_is;
    IF FOUND THEN
        RETURN jsonb_build_object('said', 'done', 'timeline', now_on, 'state', state_is);
    END IF;
    SELECT * INTO l FROM lease WHERE role = session_user;
    RETURN jsonb_build_object('said', 'lost', 'timeline', now_on, 'forgot', coalesce(
        l.token < p_token AND coalesce(l.holder, p_holder) = p_holder, false));
END $$;

CREATE OR REPLACE FUNCTION vmckpt_lease.renew(p_token bigint, p_holder text)
RETURNS jsonb {_HEAD} AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    INSERT INTO memory DEFAULT VALUES ON CONFLICT DO NOTHING;
    UPDATE lease SET renewed_at = clock_timestamp(), beat = gen_random_uuid()
     WHERE role = session_user AND token = p_token AND holder = p_holder;
    IF FOUND THEN
        RETURN jsonb_build_object('said', 'done');
    END IF;
    RETURN jsonb_build_object('said', 'lost');
END $$;

CREATE OR REPLACE FUNCTION vmckpt_lease.validate(p_token bigint, p_holder text)
RETURNS jsonb {_HEAD} AS $$
DECLARE
    l vmckpt_lease.lease := mine();
    no jsonb := refusal(l, p_token, p_holder);
BEGIN
    IF no IS NOT NULL THEN RETURN no; END IF;
    UPDATE lease SET state = 'protected' WHERE guest = l.guest;
    RETURN jsonb_build_object('said', 'done');
END $$;

CREATE OR REPLACE FUNCTION vmckpt_lease.invalidate(p_token bigint, p_holder text, p_claim text)
RETURNS jsonb {_HEAD} AS $$
DECLARE
    l vmckpt_lease.lease := mine();
    no jsonb := refusal(l, p_token, p_holder);
BEGIN
    IF l.claim = p_claim AND l.token = p_token + 1 THEN  -- the first answer was lost
        RETURN jsonb_build_object('said', 'done', 'token', l.token);
    ELSIF no IS NOT NULL THEN
        RETURN no;
    END IF;
    RETURN jsonb_build_object('said', 'done', 'token', change(l, p_holder, 'held', p_claim));
END $$;

CREATE OR REPLACE FUNCTION vmckpt_lease.take_over(
    p_token bigint, p_holder text, p_claim text, p_beat text, p_watched float8
) RETURNS jsonb {_HEAD} AS $$
DECLARE
    l vmckpt_lease.lease := mine();
    span float8 := l.ttl + l.margin;
    beat text := beat_of(l);
    rest float8;
    why text;
BEGIN
    IF l.claim = p_claim AND l.token = p_token + 1 THEN
        RETURN jsonb_build_object('said', 'done', 'token', l.token);
    END IF;
    why := CASE
        WHEN l.guest IS NULL THEN 'there is no lease for this login'
        WHEN l.token <> p_token
            THEN 'the standby has token ' || p_token || ', the lease has ' || l.token
        WHEN l.state <> 'protected' THEN 'the standby is not valid'
        WHEN l.holder = p_holder THEN p_holder || ' already holds the lease'
        WHEN l.timeline <> timeline() AND NOT coalesce(l.synchronous, false)
            THEN 'the lease store failed over, perhaps without its last changes, and '
                || l.holder || ' has not confirmed the standby since'
    END;
    IF why IS NOT NULL THEN
        RETURN jsonb_build_object('said', 'denied', 'why', why);
    END IF;
    rest := greatest(waits(l), span - CASE WHEN beat = p_beat THEN p_watched ELSE 0 END);
    IF rest > 0 THEN
        RETURN jsonb_build_object('said', 'wait', 'rest', rest, 'span', span, 'beat', beat);
    END IF;
    RETURN jsonb_build_object('said', 'done', 'token', change(l, p_holder, 'held', p_claim));
END $$;

CREATE OR REPLACE FUNCTION vmckpt_lease.hand_over(
    p_token bigint, p_holder text, p_to text, p_claim text
) RETURNS jsonb {_HEAD} AS $$
DECLARE
    l vmckpt_lease.lease := mine();
    no jsonb := refusal(l, p_token, p_holder);
BEGIN
    IF l.claim = p_claim AND l.token = p_token + 1 THEN
        RETURN jsonb_build_object('said', 'done', 'token', l.token);
    ELSIF no IS NOT NULL THEN
        RETURN no;
    ELSIF l.state <> 'protected' THEN
        RETURN jsonb_build_object('said', 'denied', 'why', 'the standby is not valid');
    END IF;
    RETURN jsonb_build_object('said', 'done', 'token', change(l, p_to, 'held', p_claim));
END $$;

CREATE OR REPLACE FUNCTION vmckpt_lease.release(p_token bigint, p_holder text)
RETURNS jsonb {_HEAD} AS $$
DECLARE
    l vmckpt_lease.lease := mine();
    no jsonb := refusal(l, p_token, p_holder);
BEGIN
    IF l.guest IS NOT NULL AND l.holder IS NULL AND l.token = p_token + 1 THEN
        RETURN jsonb_build_object('said', 'done');
    ELSIF no IS NOT NULL THEN
        RETURN no;
    END IF;
    PERFORM change(l, NULL, 'free', NULL);
    RETURN jsonb_build_object('said', 'done');
END $$;

CREATE OR REPLACE FUNCTION vmckpt_lease.look() RETURNS jsonb {_HEAD} AS $$
DECLARE l vmckpt_lease.lease;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    INSERT INTO memory DEFAULT VALUES ON CONFLICT DO NOTHING;
    SELECT * INTO l FROM lease WHERE role = session_user;
    IF l.guest IS NULL THEN
        RETURN jsonb_build_object('said', 'denied', 'why', 'there is no lease for this login');
    END IF;
    RETURN jsonb_build_object('said', 'done', 'guest', l.guest, 'session', l.session,
        'state', l.state, 'token', l.token, 'holder', l.holder, 'ttl', l.ttl,
        'margin', l.margin, 'age', extract(epoch FROM clock_timestamp() - l.renewed_at)::float8,
        'rest', waits(l), 'beat', beat_of(l));
END $$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA vmckpt_lease FROM PUBLIC;
"""

FUNCTIONS = _PARTS + _CALLS
