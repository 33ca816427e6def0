--[[
flexslurm: job_submit.lua

Runs in slurmctld, for jobs of flexslurm alone: says no to what the site file says cannot run, with
the reason for the user, asks for a requeue where the partition requeues preempted jobs, and leaves
a comment by which other hooks find the service. Never an error of its own refuses a job.

A site that has a job_submit.lua already keeps it and adds two lines:

    dofile("@HERE@/job_submit.lua")               -- at the top
    local rc = flexslurm_job_submit(job_desc, part_list)   -- in slurm_job_submit
    if rc ~= slurm.SUCCESS then return rc end

--signal and --open-mode cannot be set here (Slurm's Lua has no such fields): cli_filter.lua does.
]]

local FLEXSLURM_LIMITS = {
--@LIMITS@
}

-- The service's directory, "" where only the name or comment says that it is a job of flexslurm,
-- nil for everybody else's jobs.
local function flexslurm_service(job_desc)
   local comment = job_desc.comment or ""
   if comment:match("^flexslurm:/") then
      return comment:sub(11)
   end
   local script = job_desc.script or ""
   local dir = script:match("\nexport FLEXSLURM_SERVICE_DIR=(/[%w%._/+@~-]+)\n")
   if dir then
      return dir
   end
   -- the environment can be read for batch jobs alone
   local environment = script ~= "" and job_desc.environment
   if environment then
      dir = environment["SLURM_SPANK_FLEXSLURM_SERVICE"]
      if dir then
         return dir:match("^/") and dir or ""
      end
   end
   if comment:match("^flexslurm") or (job_desc.name or ""):match("^flexslurm") then
      return ""
   end
   return nil
end

local function flexslurm_partition(job_desc, part_list)
   if job_desc.partition then
      return job_desc.partition
   end
   for name, part in pairs(part_list or {}) do
      if part.flag_default and part.flag_default ~= 0 then
         return name
      end
   end
   return nil
end

-- "gres:gpu:a100:4" (to 23.02), "gres/gpu:a100:4" (from 23.11): type or nil, count
local function flexslurm_gpus(text)
   for entry in (text or ""):gmatch("[^,]+") do
      local rest = entry:match("^gres[:/]gpu(.*)$") or entry:match("^gpu(.*)$")
      if rest then
         local kind, count = rest:match("^:([^:=]+)[:=](%d+)$")
         if kind then
            return kind, tonumber(count)
         end
         count = rest:match("^[:=](%d+)$")
         if count or rest == "" then
            return nil, tonumber(count or 1)
         end
         return rest:match("^:(.+)$"), 1
      end
   end
   return nil, 0
end

local function flexslurm_refuse(words, code)
   slurm.log_user("flexslurm: " .. words)
   slurm.log_info("flexslurm: refused: %s", words)
   return code or slurm.ERROR
end

local function flexslurm_check(job_desc, part_list)
   local service = flexslurm_service(job_desc)
   if service == nil then
      return slurm.SUCCESS
   end
   local name = flexslurm_partition(job_desc, part_list)
   local limits = name and FLEXSLURM_LIMITS[name]
   if limits then
      local minutes = job_desc.time_limit
      if limits.max_minutes and minutes and minutes ~= slurm.NO_VAL
         and minutes > limits.max_minutes then
         return flexslurm_refuse(string.format(
            "partition '%s' allows %d minutes, the job asks for %d: lower 'walltime' in the"
            .. " service file", name, limits.max_minutes, minutes), slurm.ESLURM_INVALID_TIME_LIMIT)
      end
      local kind, count = flexslurm_gpus(job_desc.tres_per_node)
      if limits.gpus_per_node and count > limits.gpus_per_node then
         return flexslurm_refuse(string.format(
            "a node of partition '%s' has at most %d GPUs, the job asks for %d",
            name, limits.gpus_per_node, count))
      end
      if kind and #limits.types > 0 then
         local found = false
         for _, known in ipairs(limits.types) do
            found = found or known == kind
         end
         if not found then
            return flexslurm_refuse(string.format(
               "partition '%s' has no GPU type '%s', it has %s",
               name, kind, table.concat(limits.types, ", ")))
         end
      end
      if limits.requeue and job_desc.requeue == slurm.NO_VAL16 then
         job_desc.requeue = 1
      end
   end
   if job_desc.comment == nil or job_desc.comment == "" or job_desc.comment == "flexslurm" then
      job_desc.comment = service == "" and "flexslurm" or "flexslurm:" .. service
   end
   return slurm.SUCCESS
end

function flexslurm_job_submit(job_desc, part_list)
   local fine, code = pcall(flexslurm_check, job_desc, part_list)
   if fine then
      return code
   end
   slurm.log_error("flexslurm: job_submit.lua: %s", tostring(code))
   return slurm.SUCCESS
end

if slurm_job_submit == nil then
   function slurm_job_submit(job_desc, part_list, submit_uid)
      return flexslurm_job_submit(job_desc, part_list)
   end

   function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
      return slurm.SUCCESS
   end
end

return slurm.SUCCESS
