BEGIN TRANSACTION;
CREATE TABLE events (
	operation TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	at FLOAT NOT NULL, 
	kind TEXT NOT NULL, 
	data JSON NOT NULL, 
	PRIMARY KEY (operation, seq), 
	FOREIGN KEY(operation) REFERENCES operations (id) ON DELETE CASCADE
);
INSERT INTO "events" VALUES('m-aaaa',1,0.3,'decided','{"action": "abort", "reason": "it\u2019s late"}');
CREATE TABLE forecasts (
	operation TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	made_at FLOAT NOT NULL, 
	data JSON NOT NULL, 
	PRIMARY KEY (operation, seq), 
	FOREIGN KEY(operation) REFERENCES operations (id) ON DELETE CASCADE
);
INSERT INTO "forecasts" VALUES('m-aaaa',1,1700000000.25,'{"total_ms": 4000}');
CREATE TABLE meta (
	"key" TEXT NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('version','1');
INSERT INTO "meta" VALUES('pruned_at','1700000012.75');
CREATE TABLE operations (
	id TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	guest TEXT NOT NULL, 
	guest_uuid TEXT, 
	source TEXT, 
	target TEXT, 
	policy TEXT, 
	mode TEXT, 
	state TEXT NOT NULL, 
	phase TEXT, 
	outcome TEXT, 
	asked_by TEXT NOT NULL, 
	asked_from TEXT, 
	controller_host TEXT NOT NULL, 
	controller_boot TEXT NOT NULL, 
	controller_pid INTEGER NOT NULL, 
	controller_started BIGINT NOT NULL, 
	began_at FLOAT NOT NULL, 
	ended_at FLOAT, 
	thinned INTEGER NOT NULL, 
	detail JSON NOT NULL, 
	report JSON, 
	PRIMARY KEY (id)
);
INSERT INTO "operations" VALUES('m-aaaa','migrate','web1','u-1','alpha','beta','default','hybrid','ended',NULL,'completed','eve@desk','10.0.0.7','desk','0d6ce4b9-0000-4000-8000-000000000001',4711,123456,1700000000.25,1700000012.75,0,'{"observe": true}','{"total_ms": 4200.5, "passes": [{"bandwidth": 100, "lasted_ms": 3000}], "warnings": []}');
INSERT INTO "operations" VALUES('m-bbbb','migrate','web2',NULL,'beta','alpha',NULL,NULL,'running','setup',NULL,'eve@desk',NULL,'desk','0d6ce4b9-0000-4000-8000-000000000001',4711,123456,1700000012.75,NULL,0,'{}',NULL);
INSERT INTO "operations" VALUES('r-cccc','resume','web1','u-1','alpha','beta',NULL,NULL,'running',NULL,NULL,'eve@desk',NULL,'desk','0d6ce4b9-0000-4000-8000-000000000001',4711,123456,1700000012.75,NULL,0,'{"of": "m-aaaa"}',NULL);
CREATE TABLE requests (
	id INTEGER NOT NULL, 
	operation TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	arguments JSON NOT NULL, 
	asked_by TEXT NOT NULL, 
	asked_at FLOAT NOT NULL, 
	taken_at FLOAT, 
	answered_at FLOAT, 
	ok BOOLEAN, 
	answer TEXT, 
	PRIMARY KEY (id), 
	FOREIGN KEY(operation) REFERENCES operations (id) ON DELETE CASCADE
);
INSERT INTO "requests" VALUES(1,'m-aaaa','bandwidth','{"bytes_per_second": null}','bob@desk',1700000000.25,1700000000.25,1700000000.25,1,'no limit');
INSERT INTO "requests" VALUES(2,'m-bbbb','cancel','{}','bob@desk',1700000012.75,NULL,NULL,NULL,NULL);
CREATE TABLE samples (
	operation TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	at FLOAT NOT NULL, 
	data JSON NOT NULL, 
	PRIMARY KEY (operation, seq), 
	FOREIGN KEY(operation) REFERENCES operations (id) ON DELETE CASCADE
);
INSERT INTO "samples" VALUES('m-aaaa',1,0.0,'{"done": 0.0, "phase": "pre-copy"}');
INSERT INTO "samples" VALUES('m-aaaa',2,0.2,'{"done": 0.1, "phase": "pre-copy"}');
INSERT INTO "samples" VALUES('m-aaaa',3,0.4,'{"done": 0.2, "phase": "pre-copy"}');
INSERT INTO "samples" VALUES('m-aaaa',4,0.6,'{"done": 0.3, "phase": "pre-copy"}');
CREATE INDEX operations_by_end ON operations (ended_at, thinned);
CREATE INDEX operations_by_guest ON operations (guest);
CREATE INDEX operations_by_uuid ON operations (guest_uuid, began_at);
CREATE INDEX operations_by_hosts ON operations (source, target, ended_at);
CREATE INDEX operations_by_beginning ON operations (began_at);
CREATE INDEX requests_by_operation ON requests (operation, answered_at);
COMMIT;
