/*
 * flexslurm: a SPANK plugin. `--flexslurm-service=NAME|DIR` for sbatch, salloc and srun gives the
 * job's steps the service's site file, its control address and its API address:
 *
 *     FLEXSLURM_SERVICE_DIR   the service's directory
 *     FLEXSLURM_SITE          DIR/site.yaml, or the site's own (site= below)
 *     FLEXSLURM_CONTROL       tcp://ADDRESS:PORT, once a head has published it
 *     FLEXSLURM_API           http://ADDRESS:PORT
 *
 * and Prolog and Epilog SPANK_FLEXSLURM_SERVICE. In plugstack.conf:
 *
 *     optional flexslurm.so [services=DIR] [site=FILE]
 *
 * services= is where a NAME is looked for. The files of a service are read as the job's user, never
 * as root, and only some kilobytes of them. What goes wrong is logged and never fails a job.
 */
#include <ctype.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/spank.h>

SPANK_PLUGIN(flexslurm, 1);

#define OPTION "flexslurm-service"
#define MOST_BYTES 16384

static char service[PATH_MAX];
static char services_dir[PATH_MAX];
static char site_file[PATH_MAX];

/* A word that needs no quoting anywhere: what else could stand in a path is refused. */
static int plain(const char *text)
{
	if (!*text || strlen(text) >= PATH_MAX / 2)
		return 0;
	for (; *text; text++)
		if (!isalnum((unsigned char) *text) && !strchr("/._+@~-", *text))
			return 0;
	return 1;
}

static int take_service(int val, const char *optarg, int remote)
{
	(void) val;
	if (!optarg || !plain(optarg) || (*optarg != '/' && strchr(optarg, '/'))) {
		if (!remote)
			slurm_error("flexslurm: --" OPTION " takes a service's name or its directory");
		return remote ? 0 : -1;
	}
	snprintf(service, sizeof(service), "%s", optarg);
	return 0;
}

static struct spank_option option = {
	OPTION, "NAME|DIR", "give the steps the addresses of a flexslurm service", 1, 0, take_service
};

static void take_argument(const char *argument)
{
	if (!strncmp(argument, "services=", 9))
		snprintf(services_dir, sizeof(services_dir), "%s", argument + 9);
	else if (!strncmp(argument, "site=", 5))
		snprintf(site_file, sizeof(site_file), "%s", argument + 5);
	else
		slurm_error("flexslurm: plugstack.conf: unknown argument %s", argument);
}

int slurm_spank_init(spank_t spank, int ac, char **av)
{
	for (int i = 0; i < ac; i++)
		take_argument(av[i]);
	if (spank_context() == S_CTX_SLURMD || spank_context() == S_CTX_JOB_SCRIPT)
		return ESPANK_SUCCESS;
	if (spank_option_register(spank, &option) != ESPANK_SUCCESS)
		slurm_error("flexslurm: cannot register --" OPTION);
	return ESPANK_SUCCESS;
}

/* The directory of the service asked for; 0 where none is, or a name has no place to be found. */
static int directory(char *into, size_t size)
{
	int length;

	if (!*service)
		return 0;
	if (*service == '/')
		length = snprintf(into, size, "%s", service);
	else if (*services_dir)
		length = snprintf(into, size, "%s/%s", services_dir, service);
	else
		return 0;
	return length > 0 && (size_t) length < size;
}

int slurm_spank_init_post_opt(spank_t spank, int ac, char **av)
{
	char dir[PATH_MAX];

	(void) ac;
	(void) av;
	if (spank_context() != S_CTX_LOCAL && spank_context() != S_CTX_ALLOCATOR)
		return ESPANK_SUCCESS;
	if (*service && !directory(dir, sizeof(dir)))
		slurm_error("flexslurm: --" OPTION "=%s: give the directory: plugstack.conf names no"
			    " services=", service);
	else if (*service)
		spank_job_control_setenv(spank, "FLEXSLURM_SERVICE", dir, 1);
	return ESPANK_SUCCESS;
}

/* What a small regular file holds; 0 where it cannot be read. A pipe would block: it is refused. */
static int read_small(const char *path, char *into, size_t size)
{
	struct stat info;
	ssize_t got = -1;
	int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);

	if (file < 0)
		return 0;
	if (!fstat(file, &info) && S_ISREG(info.st_mode))
		got = read(file, into, size - 1);
	close(file);
	if (got < 0)
		return 0;
	into[got] = 0;
	return 1;
}

/* Exports the string at `key` of a flat JSON object, if it is an address and nothing else. */
static void export_address(spank_t spank, const char *json, const char *key, const char *variable)
{
	char quoted[32], value[256];
	const char *at, *end;

	snprintf(quoted, sizeof(quoted), "\"%s\"", key);
	at = strstr(json, quoted);
	if (!at)
		return;
	at += strlen(quoted);
	at += strspn(at, " \t\n:");
	if (*at++ != '"')
		return;
	end = strchr(at, '"');
	if (!end || (size_t) (end - at) >= sizeof(value))
		return;
	memcpy(value, at, end - at);
	value[end - at] = 0;
	for (const char *c = value; *c; c++)
		if (!isalnum((unsigned char) *c) && !strchr(":/._[]-", *c))
			return;
	spank_setenv(spank, variable, value, 1);
}

/* In the step, as the user. */
int slurm_spank_user_init(spank_t spank, int ac, char **av)
{
	static char json[MOST_BYTES];
	char dir[PATH_MAX], path[PATH_MAX + 16];

	(void) ac;
	(void) av;
	if (*site_file)
		spank_setenv(spank, "FLEXSLURM_SITE", site_file, 0);
	if (!directory(dir, sizeof(dir)))
		return ESPANK_SUCCESS;
	spank_setenv(spank, "FLEXSLURM_SERVICE_DIR", dir, 1);
	snprintf(path, sizeof(path), "%s/site.yaml", dir);
	if (!access(path, R_OK))
		spank_setenv(spank, "FLEXSLURM_SITE", path, 1);
	snprintf(path, sizeof(path), "%s/head.json", dir);
	if (read_small(path, json, sizeof(json))) {
		export_address(spank, json, "control", "FLEXSLURM_CONTROL");
		export_address(spank, json, "api", "FLEXSLURM_API");
	} else {
		slurm_info("flexslurm: no head of %s has published its address yet", dir);
	}
	return ESPANK_SUCCESS;
}
